// The kernels of one ISA as a table of function pointers, one entry for each activation dtype.
#pragma once

#include "pool.h"
#include "quatrain.h"

namespace qt {

struct Kernels {
  size_t (*linear_forward_scratch)(const qt_linear *, int64_t, int64_t, int32_t, bool);
  int (*linear_forward)(Pool &, const void *, const qt_linear *, int64_t, const void *, int64_t, const qt_dropout *, void *,
                        size_t);
  int (*lora_down)(Pool &, const void *, const qt_linear *, int64_t, int64_t, const qt_dropout *, void *, size_t);
  size_t (*linear_backward_scratch)(const qt_linear *, int64_t, int64_t, int32_t);
  int (*linear_backward)(Pool &, void *, const void *, const qt_linear *, int64_t, int64_t, const qt_dropout *, void *,
                         size_t);
};

// One table for each dtype (QT_F32, QT_BF16). Null where this build does not hold the ISA.
const Kernels *kernels_portable(int32_t dtype);
const Kernels *kernels_avx2(int32_t dtype);
const Kernels *kernels_avx512(int32_t dtype);
const Kernels *kernels_avx512_bf16(int32_t dtype);
const Kernels *kernels_amx_bf16(int32_t dtype);

}  // namespace qt
