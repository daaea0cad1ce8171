// The C ABI: argument checks, the choice of ISA, and the hand-over to its kernels.
#include <new>
#include <system_error>

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

// The build defines QT_WITHOUT_<ISA> for what its compiler does not know.
const qt::Kernels *kernels_of(int32_t isa, int32_t dtype) {
  switch (isa) {
    case QT_PORTABLE:
      return qt::kernels_portable(dtype);
#if defined(__x86_64__) && !defined(QT_WITHOUT_AVX2)
    case QT_AVX2:
      return qt::kernels_avx2(dtype);
#endif
#if defined(__x86_64__) && !defined(QT_WITHOUT_AVX512)
    case QT_AVX512:
      return qt::kernels_avx512(dtype);
#endif
#if defined(__x86_64__) && !defined(QT_WITHOUT_AVX512_BF16)
    case QT_AVX512_BF16:
      return qt::kernels_avx512_bf16(dtype);
#endif
#if defined(__x86_64__) && !defined(QT_WITHOUT_AMX_BF16)
    case QT_AMX_BF16:
      return qt::kernels_amx_bf16(dtype);
#endif
    default:
      return nullptr;
  }
}

#if defined(__x86_64__)
// Whether the CPU has the tile registers, and the kernel hands them out: on request, once for the process and all its
// threads.
bool has_amx() {
#if defined(QT_EMULATED_AMX)
  return true;
#elif defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
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
  switch (isa) {
    case QT_AVX2:
      return avx2;
    case QT_AVX512:
      return avx512;
    case QT_AVX512_BF16:
      return bf16;
    case QT_AMX_BF16:
      return bf16 && has_amx();
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

bool bad_scratch(const void *scratch, size_t bytes) {
  return bytes > 0 && (!scratch || reinterpret_cast<uintptr_t>(scratch) % 64 != 0);
}

// What an adapter, and an output that is written, must bring.
bool lacks_pointers(const qt_linear *linears, int64_t count, bool out, bool gradients) {
  for (int64_t i = 0; i < count; ++i) {
    const qt_linear &l = linears[i];
    if (out && !l.out) return true;
    if (l.rank && (!l.lora_a || !l.lora_b || !l.u || (gradients && (!l.grad_a || !l.grad_b)))) return true;
  }
  return false;
}

bool bad_attention(const qt_attention *shape) {
  return !shape || shape->kv_heads < 1 || shape->heads < 1 || shape->heads % shape->kv_heads || shape->dim < 1 ||
         shape->window < 0;
}

bool bad_rows(const int64_t *cu_seqlens, int64_t rows) {
  if (!cu_seqlens || rows < 1) return true;
  for (int64_t i = 0; i < rows; ++i)
    if (cu_seqlens[i + 1] < cu_seqlens[i]) return true;
  return false;
}

bool bad_lengths(const int64_t *lengths, int64_t rows, int64_t slots) {
  if (!lengths || rows < 1) return true;
  for (int64_t i = 0; i < rows; ++i)
    if (lengths[i] < 1 || lengths[i] > slots) return true;
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
  *out = nullptr;
  try {
    *out = new qt_context(threads, kernels_of(isa, QT_F32), kernels_of(isa, QT_BF16));
  } catch (const std::bad_alloc &) {
  } catch (const std::system_error &) {  // no thread to be had
  }
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
  if (lacks_pointers(linears, count, true, false) || bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->linear_forward(context->pool, x, linears, count, residual, tokens, dropout, scratch, scratch_bytes);
}

int32_t qt_lora_down(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                     int64_t tokens, const qt_dropout *dropout, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !x || bad_group(linears, count, tokens, dropout)) return QT_BAD_ARGUMENT;
  if (lacks_pointers(linears, count, false, false) || bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
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
  if (lacks_pointers(linears, count, true, true) || bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->linear_backward(context->pool, dx, x, linears, count, tokens, dropout, scratch, scratch_bytes);
}

size_t qt_linear_decode_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears, int64_t count,
                                      int64_t tokens) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  const qt_dropout none = {nullptr, 0.0};
  if (!kernels || bad_group(linears, count, tokens, &none)) return 0;
  return kernels->linear_decode_scratch(linears, count, tokens, context->pool.threads());
}

int32_t qt_linear_decode(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                         const void *residual, int64_t tokens, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  const qt_dropout none = {nullptr, 0.0};
  if (!kernels || !x || bad_group(linears, count, tokens, &none)) return QT_BAD_ARGUMENT;
  if (lacks_pointers(linears, count, true, false) || bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->linear_decode(context->pool, x, linears, count, residual, tokens, scratch, scratch_bytes);
}

size_t qt_attention_forward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                          int64_t longest_row) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || longest_row < 1) return 0;
  return kernels->attention_forward_scratch(*shape, longest_row, context->pool.threads());
}

int32_t qt_attention_forward(qt_context *context, int32_t dtype, void *out, float *lse, const void *q, const void *k,
                             const void *v, const int64_t *cu_seqlens, int64_t rows, const qt_attention *shape,
                             void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || bad_rows(cu_seqlens, rows) || !out || !lse || !q || !k || !v) return QT_BAD_ARGUMENT;
  if (bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->attention_forward(context->pool, out, lse, q, k, v, cu_seqlens, rows, *shape, scratch, scratch_bytes);
}

size_t qt_attention_backward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                           int64_t longest_row) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || longest_row < 1) return 0;
  return kernels->attention_backward_scratch(*shape, longest_row, context->pool.threads());
}

int32_t qt_attention_backward(qt_context *context, int32_t dtype, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const float *lse, const void *q, const void *k, const void *v,
                              const int64_t *cu_seqlens, int64_t rows, const qt_attention *shape, void *scratch,
                              size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || bad_rows(cu_seqlens, rows)) return QT_BAD_ARGUMENT;
  if (!dq || !dk || !dv || !dout || !out || !lse || !q || !k || !v) return QT_BAD_ARGUMENT;
  if (bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->attention_backward(context->pool, dq, dk, dv, dout, out, lse, q, k, v, cu_seqlens, rows, *shape, scratch,
                                     scratch_bytes);
}

size_t qt_attention_cached_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                         int64_t slots) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || slots < 1) return 0;
  return kernels->attention_cached_scratch(*shape, slots, context->pool.threads());
}

int32_t qt_attention_cached(qt_context *context, int32_t dtype, void *out, const void *q, const void *k, const void *v,
                            void *keys, void *values, const int64_t *lengths, int64_t rows, int64_t slots,
                            const qt_attention *shape, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || bad_attention(shape) || bad_lengths(lengths, rows, slots)) return QT_BAD_ARGUMENT;
  if (!out || !q || !k || !v || !keys || !values || bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->attention_cached(context->pool, out, q, k, v, keys, values, lengths, rows, slots, *shape, scratch,
                                   scratch_bytes);
}

int32_t qt_rms_norm_forward(qt_context *context, int32_t dtype, void *out, float *rstd, const void *x, const float *weight,
                            float eps, int64_t rows, int64_t dim) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !out || !rstd || !x || !weight || rows < 0 || dim < 1) return QT_BAD_ARGUMENT;
  return kernels->rms_norm_forward(context->pool, out, rstd, x, weight, eps, rows, dim);
}

int32_t qt_rms_norm_backward(qt_context *context, int32_t dtype, void *dx, float *dweight, const void *dout, const void *x,
                             const float *rstd, const float *weight, const void *residual, int64_t rows, int64_t dim) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !dx || !dout || !x || !rstd || !weight || rows < 0 || dim < 1) return QT_BAD_ARGUMENT;
  return kernels->rms_norm_backward(context->pool, dx, dweight, dout, x, rstd, weight, residual, rows, dim);
}

int32_t qt_rope(qt_context *context, int32_t dtype, void *x, const float *cos, const float *sin, float sign, int64_t tokens,
                int64_t heads, int64_t dim, int64_t half) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !x || !cos || !sin || tokens < 0 || heads < 1 || half < 1 || 2 * half > dim) return QT_BAD_ARGUMENT;
  return kernels->rope(context->pool, x, cos, sin, sign, tokens, heads, dim, half);
}

int32_t qt_swiglu_forward(qt_context *context, int32_t dtype, void *out, const void *gate, const void *up, int64_t n) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !out || !gate || !up || n < 0) return QT_BAD_ARGUMENT;
  return kernels->swiglu_forward(context->pool, out, gate, up, n);
}

int32_t qt_swiglu_backward(qt_context *context, int32_t dtype, void *dgate, void *dup, const void *dout, const void *gate,
                           const void *up, int64_t n) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !dgate || !dup || !dout || !gate || !up || n < 0) return QT_BAD_ARGUMENT;
  return kernels->swiglu_backward(context->pool, dgate, dup, dout, gate, up, n);
}

int32_t qt_embedding(qt_context *context, int32_t dtype, void *out, const int64_t *ids, const void *table, int64_t rows,
                     int64_t dim) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !out || !ids || !table || rows < 0 || dim < 1) return QT_BAD_ARGUMENT;
  return kernels->embedding(context->pool, out, ids, table, rows, dim);
}

size_t qt_head_loss_scratch_bytes(const qt_context *context, int32_t dtype, int64_t chunk, int64_t hidden, int64_t vocab) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || chunk < 1 || hidden < 1 || vocab < 1) return 0;
  return kernels->head_loss_scratch(chunk, hidden, vocab, context->pool.threads());
}

int32_t qt_head_loss(qt_context *context, int32_t dtype, float *losses, void *dhidden, const void *hidden_states,
                     const int64_t *rows, const int64_t *targets, int64_t num_rows, const void *head, int64_t tokens,
                     int64_t hidden, int64_t vocab, int64_t chunk, void *scratch, size_t scratch_bytes) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !hidden_states || !head || num_rows < 0 || tokens < 1 || hidden < 1 || vocab < 1 || chunk < 1)
    return QT_BAD_ARGUMENT;
  if (num_rows > 0 && (!losses || !rows || !targets)) return QT_BAD_ARGUMENT;
  if (bad_scratch(scratch, scratch_bytes)) return QT_BAD_ARGUMENT;
  return kernels->head_loss(context->pool, losses, dhidden, hidden_states, rows, targets, num_rows, head, tokens, hidden,
                            vocab, chunk, scratch, scratch_bytes);
}

int64_t qt_sum_squares_partials(int64_t n) { return n / qt::kSumPiece + 1; }

int32_t qt_sum_squares(qt_context *context, double *out, const float *grad, int64_t n, double *partial) {
  const qt::Kernels *kernels = kernels_for(context, QT_F32);
  if (!kernels || !out || !grad || !partial || n < 0) return QT_BAD_ARGUMENT;
  return kernels->sum_squares(context->pool, out, grad, n, partial);
}

int32_t qt_adamw(qt_context *context, float *param, float *exp_avg, float *exp_avg_sq, void *copy, const float *grad,
                 const double *scale, const uint8_t *skip, const double *lr, const int64_t *step, double beta1, double beta2,
                 double eps, double weight_decay, int64_t n) {
  const qt::Kernels *kernels = kernels_for(context, QT_F32);
  if (!kernels || !param || !exp_avg || !exp_avg_sq || !grad || !scale || !skip || !lr || !step || n < 0)
    return QT_BAD_ARGUMENT;
  return kernels->adamw(context->pool, param, exp_avg, exp_avg_sq, copy, grad, scale, skip, lr, step, beta1, beta2, eps,
                        weight_decay, n);
}

int32_t qt_nf4_quantize(qt_context *context, int32_t dtype, uint8_t *codes, float *absmax, int32_t *finite,
                        const void *values, int64_t n) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !codes || !absmax || !finite || !values || n < 1) return QT_BAD_ARGUMENT;
  return kernels->nf4_quantize(context->pool, codes, absmax, finite, values, n);
}

int32_t qt_nf4_nested(qt_context *context, uint8_t *absmax_codes, float *absmax2, const float *absmax, float offset,
                      const uint8_t *nearest, int64_t blocks) {
  const qt::Kernels *kernels = kernels_for(context, QT_F32);
  if (!kernels || !absmax_codes || !absmax2 || !absmax || !nearest || blocks < 1) return QT_BAD_ARGUMENT;
  return kernels->nf4_nested(context->pool, absmax_codes, absmax2, absmax, offset, nearest, blocks);
}

int32_t qt_nf4_error(qt_context *context, int32_t dtype, double *error, double *norm, const qt_weight *weight,
                     const void *values) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !error || !norm || !values || !weight || !weight->codes || weight->n < 1 || weight->k < 1)
    return QT_BAD_ARGUMENT;
  return kernels->nf4_error(context->pool, error, norm, *weight, values);
}

int32_t qt_nf4_dequantize(qt_context *context, int32_t dtype, void *out, const qt_weight *weight) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !out || !weight || !weight->codes || weight->n < 1 || weight->k < 1) return QT_BAD_ARGUMENT;
  return kernels->nf4_dequantize(context->pool, out, *weight);
}

int32_t qt_peak(qt_context *context, int32_t dtype, int64_t iterations, double *flops) {
  const qt::Kernels *kernels = kernels_for(context, dtype);
  if (!kernels || !flops || iterations < 1) return QT_BAD_ARGUMENT;
  *flops = kernels->peak(context->pool, iterations);
  return QT_OK;
}

}  // extern "C"
