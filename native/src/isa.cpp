// Every kernel for one ISA. The build compiles this file once for each, with -DQT_ISA=<name> and the ISA's own flags.
#include "gemm_f32.h"
#if defined(__AVX512BF16__)
#include "gemm_tiles.h"
#endif

#include "fill_table.h"

#define QT_JOIN_(a, b) a##b
#define QT_JOIN(a, b) QT_JOIN_(a, b)

namespace qt {
namespace QT_ISA {

#if defined(__AMX_BF16__) || defined(QT_EMULATED_AMX)
using Bf16 = GemmAmx;
#elif defined(__AVX512BF16__)
using Bf16 = GemmDot;
#else
using Bf16 = F32;
#endif

#if defined(__AVX512BF16__)
using Bf16Dot = PairDot;
#else
using Bf16Dot = WideDot;
#endif

}  // namespace QT_ISA

const Kernels *QT_JOIN(kernels_, QT_ISA)(int32_t dtype) {
  static constexpr Kernels f32 = QT_ISA::make_kernels<QT_ISA::F32, QT_ISA::WideDot, float>();
  static constexpr Kernels bf16 = QT_ISA::make_kernels<QT_ISA::Bf16, QT_ISA::Bf16Dot, QT_ISA::bf16>();
  return dtype == QT_F32 ? &f32 : dtype == QT_BF16 ? &bf16 : nullptr;
}

}  // namespace qt
