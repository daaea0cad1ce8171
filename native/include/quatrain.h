/* Quatrain's native kernels: a plain C ABI over raw pointers.
 *
 * Promises: no allocation inside a kernel (scratch is the caller's; each op that needs it has a _scratch_bytes twin), no
 * hidden global state, no dependence of any result on the thread count, status codes instead of in-band errors.
 *
 * Scratch must be aligned to 64 bytes. Asking whether AMX is supported also asks the kernel for permission to use it.
 *
 * Matrices are row-major and contiguous unless a leading dimension is passed. `dtype` names the type of activations and
 * compute copies: QT_F32 or QT_BF16. Accumulation, norms, softmax, losses, masters and moments are fp32.
 */
#ifndef QUATRAIN_H
#define QUATRAIN_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define QT_API __attribute__((visibility("default")))
#else
#define QT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define QT_ABI_VERSION 1

enum { QT_OK = 0, QT_BAD_ARGUMENT = 1, QT_UNSUPPORTED = 2, QT_SCRATCH_TOO_SMALL = 3, QT_NO_MEMORY = 4 };
enum { QT_F32 = 0, QT_BF16 = 1 };

/* Instruction sets, weakest first. A library holds those of its own architecture. */
enum { QT_PORTABLE = 0, QT_AVX2 = 1, QT_AVX512 = 2, QT_AVX512_BF16 = 3, QT_AMX_BF16 = 4, QT_NUM_ISAS = 5 };

QT_API int32_t qt_abi_version(void);
QT_API const char *qt_isa_name(int32_t isa);
/* 1 if this build holds kernels for `isa` and this machine can run them. */
QT_API int32_t qt_isa_supported(int32_t isa);
/* The strongest supported one. */
QT_API int32_t qt_best_isa(void);

/* A context is a thread pool and a choice of ISA. Calls on one context must not overlap. */
typedef struct qt_context qt_context;
QT_API int32_t qt_context_create(qt_context **out, int32_t isa, int32_t threads);
QT_API void qt_context_destroy(qt_context *context);

/* A frozen weight [n, k]: NF4 in bitsandbytes' layout (codes != NULL), or plain in `dtype` (dense != NULL).
 * absmax (fp32 [blocks]) or, nested, absmax_codes, absmax2, offset and code2 (fp32 [256]). */
typedef struct {
  int64_t n, k;
  const void *dense;
  const uint8_t *codes;
  const float *absmax;
  const uint8_t *absmax_codes;
  const float *absmax2;
  const float *code2;
  float offset;
} qt_weight;

/* One linear layer of a group that shares its input. bias [n] and the adapter (rank > 0: A [r, k], B [n, r], in
 * `dtype`; dA, dB fp32) are optional. `out` [tokens, n] is the output, and in the backward the gradient of it. */
typedef struct {
  qt_weight weight;
  const void *bias;
  const void *lora_a;
  const void *lora_b;
  float *grad_a;
  float *grad_b;
  void *u; /* [tokens, r] */
  void *out;
  int64_t rank;
  float scale;
  int32_t index; /* keys this adapter's dropout mask */
} qt_linear;

/* Dropout on the adapters' input; keys == NULL: none. */
typedef struct {
  const int64_t *keys; /* [tokens] */
  double p;
} qt_dropout;

/* Linear layers that share x [tokens, k] (at most 8): out_i = x W_i^T + b_i + scale_i u_i B_i^T, u_i = mask x A_i^T.
 * `residual` (NULL, or [tokens, n] for a group of one) is added to the output. Writes (=) each linear's out and u. */
QT_API size_t qt_linear_forward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears, int64_t count,
                                       int64_t tokens, const qt_dropout *dropout);
QT_API int32_t qt_linear_forward(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                          const void *residual, int64_t tokens, const qt_dropout *dropout, void *scratch,
                          size_t scratch_bytes);
/* Only u_i (=). Same scratch. */
QT_API int32_t qt_lora_down(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                     int64_t tokens, const qt_dropout *dropout, void *scratch, size_t scratch_bytes);
/* With dout_i in each linear's `out`, and u_i as the forward left it: dx [tokens, k] =, grad_a and grad_b +=. */
QT_API size_t qt_linear_backward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears,
                                        int64_t count, int64_t tokens);
QT_API int32_t qt_linear_backward(qt_context *context, int32_t dtype, void *dx, const void *x, const qt_linear *linears,
                           int64_t count, int64_t tokens, const qt_dropout *dropout, void *scratch, size_t scratch_bytes);

/* The forward for a few tokens, reading NF4 codes as they are; no dropout. A token's bits do not depend on the tokens
 * beside it. Values agree with qt_linear_forward's within rounding. */
QT_API size_t qt_linear_decode_scratch_bytes(const qt_context *context, int32_t dtype, const qt_linear *linears,
                                             int64_t count, int64_t tokens);
QT_API int32_t qt_linear_decode(qt_context *context, int32_t dtype, const void *x, const qt_linear *linears, int64_t count,
                                const void *residual, int64_t tokens, void *scratch, size_t scratch_bytes);

/* Causal grouped-query attention over rows of a packed stream. cu_seqlens [rows + 1]; q, out [tokens, heads, dim];
 * k, v [tokens, kv_heads, dim]; lse fp32 [tokens, heads]; window 0: none. All outputs =. dq may be dout. */
typedef struct {
  int64_t heads, kv_heads, dim, window;
  float scale;
} qt_attention;
QT_API size_t qt_attention_forward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                                 int64_t longest_row);
QT_API int32_t qt_attention_forward(qt_context *context, int32_t dtype, void *out, float *lse, const void *q,
                                    const void *k, const void *v, const int64_t *cu_seqlens, int64_t rows,
                                    const qt_attention *shape, void *scratch, size_t scratch_bytes);
QT_API size_t qt_attention_backward_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                                  int64_t longest_row);
QT_API int32_t qt_attention_backward(qt_context *context, int32_t dtype, void *dq, void *dk, void *dv, const void *dout,
                                     const void *out, const float *lse, const void *q, const void *k, const void *v,
                                     const int64_t *cu_seqlens, int64_t rows, const qt_attention *shape, void *scratch,
                                     size_t scratch_bytes);

/* One new token a row over a cache: k, v [rows, kv_heads, dim] go to slot lengths[row] - 1 of keys, values [rows, slots,
 * kv_heads, dim], then out [rows, heads, dim] = attention of q over the last `window` of the row's lengths[row] slots. */
QT_API size_t qt_attention_cached_scratch_bytes(const qt_context *context, int32_t dtype, const qt_attention *shape,
                                                int64_t slots);
QT_API int32_t qt_attention_cached(qt_context *context, int32_t dtype, void *out, const void *q, const void *k,
                                   const void *v, void *keys, void *values, const int64_t *lengths, int64_t rows,
                                   int64_t slots, const qt_attention *shape, void *scratch, size_t scratch_bytes);

/* Row-wise ops. All outputs =, but dweight +=. */
QT_API int32_t qt_rms_norm_forward(qt_context *context, int32_t dtype, void *out, float *rstd, const void *x,
                                   const float *weight, float eps, int64_t rows, int64_t dim);
QT_API int32_t qt_rms_norm_backward(qt_context *context, int32_t dtype, void *dx, float *dweight, const void *dout,
                                    const void *x, const float *rstd, const float *weight, const void *residual,
                                    int64_t rows, int64_t dim);
QT_API int32_t qt_rope(qt_context *context, int32_t dtype, void *x, const float *cos, const float *sin, float sign,
                       int64_t tokens, int64_t heads, int64_t dim, int64_t half);
QT_API int32_t qt_swiglu_forward(qt_context *context, int32_t dtype, void *out, const void *gate, const void *up,
                                 int64_t n);
QT_API int32_t qt_swiglu_backward(qt_context *context, int32_t dtype, void *dgate, void *dup, const void *dout,
                                  const void *gate, const void *up, int64_t n);
QT_API int32_t qt_embedding(qt_context *context, int32_t dtype, void *out, const int64_t *ids, const void *table,
                            int64_t rows, int64_t dim);

/* Head and cross-entropy on `num_rows` rows: losses [num_rows] =, dhidden [tokens, hidden] = (NULL: losses only), the
 * gradient of the sum of the losses. head [vocab, hidden]; `chunk` rows are worked on at a time. No logit is stored. */
QT_API size_t qt_head_loss_scratch_bytes(const qt_context *context, int32_t dtype, int64_t chunk, int64_t hidden,
                                         int64_t vocab);
QT_API int32_t qt_head_loss(qt_context *context, int32_t dtype, float *losses, void *dhidden, const void *hidden_states,
                            const int64_t *rows, const int64_t *targets, int64_t num_rows, const void *head,
                            int64_t tokens, int64_t hidden, int64_t vocab, int64_t chunk, void *scratch,
                            size_t scratch_bytes);

/* Flat segments. *out = sum of squares (fp64); `partial` is scratch of qt_sum_squares_partials(n) doubles. */
QT_API int64_t qt_sum_squares_partials(int64_t n);
QT_API int32_t qt_sum_squares(qt_context *context, double *out, const float *grad, int64_t n, double *partial);
/* One AdamW update in place; copy (bf16 [n] or NULL) gets the new parameters. See ops/adamw. */
QT_API int32_t qt_adamw(qt_context *context, float *param, float *exp_avg, float *exp_avg_sq, void *copy,
                        const float *grad, const double *scale, const uint8_t *skip, const double *lr,
                        const int64_t *step, double beta1, double beta2, double eps, double weight_decay, int64_t n);

/* NF4 of n contiguous values: codes [ceil(n / 2)], absmax [ceil(n / 64)] =; *finite = 0 if a value is not finite. */
QT_API int32_t qt_nf4_quantize(qt_context *context, int32_t dtype, uint8_t *codes, float *absmax, int32_t *finite,
                               const void *values, int64_t n);
/* Nested statistics of absmax [blocks] with the mean `offset`: absmax_codes [blocks], absmax2 [ceil(blocks / 256)] =.
 * nearest [65536]: the 8-bit code of each bin of [-1, 1]. */
QT_API int32_t qt_nf4_nested(qt_context *context, uint8_t *absmax_codes, float *absmax2, const float *absmax,
                             float offset, const uint8_t *nearest, int64_t blocks);
/* *error, *norm = the sums of (weight - values)^2 and values^2 over `values` [n, k], in fp64. */
QT_API int32_t qt_nf4_error(qt_context *context, int32_t dtype, double *error, double *norm, const qt_weight *weight,
                            const void *values);
QT_API int32_t qt_nf4_dequantize(qt_context *context, int32_t dtype, void *out, const qt_weight *weight);

/* Every thread does nothing but products from registers, `iterations` rounds: *flops is what all of them did. */
QT_API int32_t qt_peak(qt_context *context, int32_t dtype, int64_t iterations, double *flops);

#ifdef __cplusplus
}
#endif
#endif
