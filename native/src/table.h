// The kernels of one ISA as a table of function pointers, one entry for each activation dtype.
#pragma once

#include "pool.h"
#include "quatrain.h"

namespace qt {

// Elements of a partial sum of squares.
constexpr int64_t kSumPiece = 1 << 14;

struct Kernels {
  size_t (*linear_forward_scratch)(const qt_linear *, int64_t, int64_t, int32_t, bool);
  int (*linear_forward)(Pool &, const void *, const qt_linear *, int64_t, const void *, int64_t, const qt_dropout *, void *,
                        size_t);
  int (*lora_down)(Pool &, const void *, const qt_linear *, int64_t, int64_t, const qt_dropout *, void *, size_t);
  size_t (*linear_backward_scratch)(const qt_linear *, int64_t, int64_t, int32_t);
  int (*linear_backward)(Pool &, void *, const void *, const qt_linear *, int64_t, int64_t, const qt_dropout *, void *,
                         size_t);
  size_t (*linear_decode_scratch)(const qt_linear *, int64_t, int64_t, int32_t);
  int (*linear_decode)(Pool &, const void *, const qt_linear *, int64_t, const void *, int64_t, void *, size_t);
  size_t (*attention_forward_scratch)(const qt_attention &, int64_t, int32_t);
  int (*attention_forward)(Pool &, void *, float *, const void *, const void *, const void *, const int64_t *, int64_t,
                           const qt_attention &, void *, size_t);
  size_t (*attention_backward_scratch)(const qt_attention &, int64_t, int32_t);
  int (*attention_backward)(Pool &, void *, void *, void *, const void *, const void *, const float *, const void *,
                            const void *, const void *, const int64_t *, int64_t, const qt_attention &, void *, size_t);
  size_t (*attention_cached_scratch)(const qt_attention &, int64_t, int32_t);
  int (*attention_cached)(Pool &, void *, const void *, const void *, const void *, void *, void *, const int64_t *, int64_t,
                          int64_t, const qt_attention &, void *, size_t);
  int (*rms_norm_forward)(Pool &, void *, float *, const void *, const float *, float, int64_t, int64_t);
  int (*rms_norm_backward)(Pool &, void *, float *, const void *, const void *, const float *, const float *, const void *,
                           int64_t, int64_t);
  int (*rope)(Pool &, void *, const float *, const float *, float, int64_t, int64_t, int64_t, int64_t);
  int (*swiglu_forward)(Pool &, void *, const void *, const void *, int64_t);
  int (*swiglu_backward)(Pool &, void *, void *, const void *, const void *, const void *, int64_t);
  int (*embedding)(Pool &, void *, const int64_t *, const void *, int64_t, int64_t);
  size_t (*head_loss_scratch)(int64_t, int64_t, int64_t, int32_t);
  int (*head_loss)(Pool &, float *, void *, const void *, const int64_t *, const int64_t *, int64_t, const void *, int64_t,
                   int64_t, int64_t, int64_t, void *, size_t);
  int (*sum_squares)(Pool &, double *, const float *, int64_t, double *);
  int (*adamw)(Pool &, float *, float *, float *, void *, const float *, const double *, const uint8_t *, const double *,
               const int64_t *, double, double, double, double, int64_t);
  int (*nf4_quantize)(Pool &, uint8_t *, float *, int32_t *, const void *, int64_t);
  int (*nf4_nested)(Pool &, uint8_t *, float *, const float *, float, const uint8_t *, int64_t);
  int (*nf4_error)(Pool &, double *, double *, const qt_weight &, const void *);
  int (*nf4_dequantize)(Pool &, void *, const qt_weight &);
  double (*peak)(Pool &, int64_t);
};

// One table for each dtype (QT_F32, QT_BF16). Null where this build does not hold the ISA.
const Kernels *kernels_portable(int32_t dtype);
const Kernels *kernels_avx2(int32_t dtype);
const Kernels *kernels_avx512(int32_t dtype);
const Kernels *kernels_avx512_bf16(int32_t dtype);
const Kernels *kernels_amx_bf16(int32_t dtype);

}  // namespace qt
