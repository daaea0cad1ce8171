// The C ABI: argument checks, the choice of ISA, and the hand-over to its kernels.
#include <new>

#include "table.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct qt_context {
  qt::Pool pool;
  const qt::Kernels *kernels[2];
  qt_context(int32_t threads, const qt::Kernels *f32, const qt::Kernels *bf16) : pool(threads), kernels{f32, bf16} {}
};

namespace {

const qt::Kernels *kernels_of(int32_t isa, int32_t dtype) {
  switch (isa) {
    case QT_PORTABLE:
      return qt::kernels_portable(dtype);
#if defined(__x86_64__)
    case QT_AVX2:
      return qt::kernels_avx2(dtype);
    case QT_AVX512:
      return qt::kernels_avx512(dtype);
    case QT_AVX512_BF16:
      return qt::kernels_avx512_bf16(dtype);
    case QT_AMX_BF16:
      return qt::kernels_amx_bf16(dtype);
#endif
    default:
      return nullptr;
  }
}

#if defined(__x86_64__)
// The kernel hands out the tile registers on request, once for the process and all its threads.
bool amx_permitted() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

bool cpu_has(int32_t isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  const bool amx = bf16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
  switch (isa) {
    case QT_AVX2:
      return avx2;
    case QT_AVX512:
      return avx512;
    case QT_AVX512_BF16:
      return bf16;
    case QT_AMX_BF16:
      return amx && amx_permitted();
    default:
      return false;
  }
}
#endif

const qt::Kernels *kernels_for(const qt_context *context, int32_t dtype) {
  return context && (dtype == QT_F32 || dtype == QT_BF16) ? context->kernels[dtype] : nullptr;
}

bool bad_group(const qt_linear *linears, int64_t count, int64_t tokens, const qt_dropout *dropout) {
  if (!linears || !dropout || count < 1 || count > 8 || tokens < 1) return true;
  for (int64_t i = 0; i < count; ++i) {
    const qt_weight &w = linears[i].weight;
    if (w.n < 1 || w.k < 1 || w.k != linears[0].weight.k || linears[i].rank < 0) return true;
    if (!w.codes == !w.dense) return true;
  }
  return false;
}

}  // namespace

extern "C" {

int32_t qt_abi_version(void) { return QT_ABI_VERSION; }

const char *qt_isa_name(int32_t isa) {
  static const char *const names[QT_NUM_ISAS] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
  return isa >= 0 && isa < QT_NUM_ISAS ? names[isa] : "unknown";
}

int32_t qt_isa_supported(int32_t isa) {
  if (!kernels_of(isa, QT_F32)) return 0;
#if defined(__x86_64__)
  return isa == QT_PORTABLE || cpu_has(isa);
#else
  return isa == QT_PORTABLE;
#endif
}

int32_t qt_best_isa(void) {
  for (int32_t isa = QT_NUM_ISAS - 1; isa > QT_PORTABLE; --isa)
    if (qt_isa_supported(isa)) return isa;
  return QT_PORTABLE;
}

int32_t qt_context_create(qt_context **out, int32_t isa, int32_t threads) {
  if (!out || threads < 1 || threads > 1024) return QT_BAD_ARGUMENT;
  if (!qt_isa_supported(isa)) return QT_UNSUPPORTED;
  *out = new (std::nothrow) qt_context(threads, kernels_of(isa, QT_F32), kernels_of(isa, QT_BF16));
  return *out ? QT_OK : QT_NO_MEMORY;
}

void qt_context_destroy(qt_context *context) { delete context; }

size_t qt_linear_forward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears, int64_t count,
                                       int64_t tokens, const qt_dropout *dropout) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_group(linears, count, tokens, dropout)) return 0;
  return kernels->linear_forward_scratch(linears, count, tokens, context->pool.threads(), dropout->keys != nullptr);
}

int32_t qt_linear_forward(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                          const void *residual, int64_t tokens, const qt_dropout *dropout, void *scratch,
                          size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !x || bad_group(linears, count, tokens, dropout) || (residual && count != 1)) return QT_BAD_ARGUMENT;
  return kernels->linear_forward(context->pool, x, linears, count, residual, tokens, dropout, scratch, scratch_bytes);
}

int32_t qt_lora_down(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                     int64_t tokens, const qt_dropout *dropout, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !x || bad_group(linears, count, tokens, dropout)) return QT_BAD_ARGUMENT;
  return kernels->lora_down(context->pool, x, linears, count, tokens, dropout, scratch, scratch_bytes);
}

size_t qt_linear_backward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears,
                                        int64_t count, int64_t tokens) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  const qt_dropout none = {nullptr, 0.0};
  if (!kernels || bad_group(linears, count, tokens, &none)) return 0;
  return kernels->linear_backward_scratch(linears, count, tokens, context->pool.threads());
}

int32_t qt_linear_backward(qt_context *context, int32_t dtype, void *dx, const void *x, const qt_linear *linears,
                           int64_t count, int64_t tokens, const qt_dropout *dropout, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !dx || !x || bad_group(linears, count, tokens, dropout)) return QT_BAD_ARGUMENT;
  return kernels->linear_backward(context->pool, dx, x, linears, count, tokens, dropout, scratch, scratch_bytes);
}

}  // extern "C"
