// Fills a `Kernels` table for activations T with products by G, and by D where tokens are few. Included by each ISA's file, compiled with its flags.
#pragma once

#include "attention.h"
#include "cached_attention.h"
#include "decode.h"
#include "elementwise.h"
#include "head.h"
#include "linear.h"
#include "nf4_ops.h"
#include "optimizer.h"
#include "table.h"

namespace qt::QT_ISA {

template <class G, class D, class T>
constexpr Kernels make_kernels() {
  using L = Linear<G, T>;
  using F = Decode<D, T>;
  using A = Attention<G, T>;
  using C = CachedAttention<T>;
  using H = Head<G, T>;
  return Kernels{
      L::forward_scratch,
      [](Pool &pool, const void *x, const qt_linear *linears, int64_t count, const void *residual, int64_t tokens,
         const qt_dropout *dropout, void *scratch, size_t bytes) {
        return L::forward(pool, static_cast<const T *>(x), linears, count, static_cast<const T *>(residual), tokens, dropout,
                          scratch, bytes);
      },
      [](Pool &pool, const void *x, const qt_linear *linears, int64_t count, int64_t tokens, const qt_dropout *dropout,
         void *scratch, size_t bytes) {
        return L::lora_down(pool, static_cast<const T *>(x), linears, count, tokens, dropout, scratch, bytes);
      },
      L::backward_scratch,
      [](Pool &pool, void *dx, const void *x, const qt_linear *linears, int64_t count, int64_t tokens,
         const qt_dropout *dropout, void *scratch, size_t bytes) {
        return L::backward(pool, static_cast<T *>(dx), static_cast<const T *>(x), linears, count, tokens, dropout, scratch,
                           bytes);
      },
      F::scratch,
      [](Pool &pool, const void *x, const qt_linear *linears, int64_t count, const void *residual, int64_t tokens,
         void *scratch, size_t bytes) {
        return F::run(pool, static_cast<const T *>(x), linears, count, static_cast<const T *>(residual), tokens, scratch,
                      bytes);
      },
      A::forward_scratch,
      [](Pool &pool, void *out, float *lse, const void *q, const void *k, const void *v, const int64_t *cu_seqlens,
         int64_t rows, const qt_attention &shape, void *scratch, size_t bytes) {
        return A::forward(pool, static_cast<T *>(out), lse, static_cast<const T *>(q), static_cast<const T *>(k),
                          static_cast<const T *>(v), cu_seqlens, rows, shape, scratch, bytes);
      },
      A::backward_scratch,
      [](Pool &pool, void *dq, void *dk, void *dv, const void *dout, const void *out, const float *lse, const void *q,
         const void *k, const void *v, const int64_t *cu_seqlens, int64_t rows, const qt_attention &shape, void *scratch,
         size_t bytes) {
        return A::backward(pool, static_cast<T *>(dq), static_cast<T *>(dk), static_cast<T *>(dv),
                           static_cast<const T *>(dout), static_cast<const T *>(out), lse, static_cast<const T *>(q),
                           static_cast<const T *>(k), static_cast<const T *>(v), cu_seqlens, rows, shape, scratch, bytes);
      },
      C::scratch,
      [](Pool &pool, void *out, const void *q, const void *k, const void *v, void *keys, void *values,
         const int64_t *lengths, int64_t rows, int64_t slots, const qt_attention &shape, void *scratch, size_t bytes) {
        return C::run(pool, static_cast<T *>(out), static_cast<const T *>(q), static_cast<const T *>(k),
                      static_cast<const T *>(v), static_cast<T *>(keys), static_cast<T *>(values), lengths, rows, slots,
                      shape, scratch, bytes);
      },
      [](Pool &pool, void *out, float *rstd, const void *x, const float *weight, float eps, int64_t rows, int64_t d) {
        return rms_norm_forward(pool, static_cast<T *>(out), rstd, static_cast<const T *>(x), weight, eps, rows, d);
      },
      [](Pool &pool, void *dx, float *dweight, const void *dout, const void *x, const float *rstd, const float *weight,
         const void *residual, int64_t rows, int64_t d) {
        return rms_norm_backward(pool, static_cast<T *>(dx), dweight, static_cast<const T *>(dout),
                                 static_cast<const T *>(x), rstd, weight, static_cast<const T *>(residual), rows, d);
      },
      [](Pool &pool, void *x, const float *cos, const float *sin, float sign, int64_t tokens, int64_t heads, int64_t d,
         int64_t half) { return rope(pool, static_cast<T *>(x), cos, sin, sign, tokens, heads, d, half); },
      [](Pool &pool, void *out, const void *gate, const void *up, int64_t n) {
        return swiglu_forward(pool, static_cast<T *>(out), static_cast<const T *>(gate), static_cast<const T *>(up), n);
      },
      [](Pool &pool, void *dgate, void *dup, const void *dout, const void *gate, const void *up, int64_t n) {
        return swiglu_backward(pool, static_cast<T *>(dgate), static_cast<T *>(dup), static_cast<const T *>(dout),
                               static_cast<const T *>(gate), static_cast<const T *>(up), n);
      },
      [](Pool &pool, void *out, const int64_t *ids, const void *table, int64_t rows, int64_t d) {
        return embedding(pool, static_cast<T *>(out), ids, static_cast<const T *>(table), rows, d);
      },
      H::scratch,
      [](Pool &pool, float *losses, void *dhidden, const void *hidden, const int64_t *rows, const int64_t *targets,
         int64_t num_rows, const void *head, int64_t tokens, int64_t width, int64_t vocab, int64_t chunk, void *scratch,
         size_t bytes) {
        return H::run(pool, losses, static_cast<T *>(dhidden), static_cast<const T *>(hidden), rows, targets, num_rows,
                      static_cast<const T *>(head), tokens, width, vocab, chunk, scratch, bytes);
      },
      sum_squares,
      [](Pool &pool, float *param, float *exp_avg, float *exp_avg_sq, void *copy, const float *grad, const double *scale,
         const uint8_t *skip, const double *lr, const int64_t *step, double beta1, double beta2, double eps,
         double weight_decay, int64_t n) {
        return adamw(pool, param, exp_avg, exp_avg_sq, static_cast<bf16 *>(copy), grad, scale, skip, lr, step, beta1, beta2,
                     eps, weight_decay, n);
      },
      [](Pool &pool, uint8_t *codes, float *absmax, int32_t *finite, const void *values, int64_t n) {
        return nf4_quantize(pool, codes, absmax, finite, static_cast<const T *>(values), n);
      },
      nf4_nested,
      [](Pool &pool, double *error, double *norm, const qt_weight &w, const void *values) {
        return nf4_error(pool, error, norm, w, static_cast<const T *>(values));
      },
      [](Pool &pool, void *out, const qt_weight &w) { return nf4_dequantize(pool, static_cast<T *>(out), w); },
      [](Pool &pool, int64_t iterations) {
        pool.parallel_for(pool.threads(), [&](int64_t, int32_t) {
          G::thread_begin();
          G::peak(iterations);
          G::thread_end();
        });
        G::thread_begin();
        const double each = G::peak(1);
        G::thread_end();
        return each * static_cast<double>(iterations) * pool.threads();
      },
  };
}

}  // namespace qt::QT_ISA
