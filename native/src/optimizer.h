// Flat-segment gradient norm and AdamW. Sums in fp64, in pieces that do not depend on the thread count.
#pragma once

#include <cmath>

#include "common.h"
#include "elementwise.h"
#include "table.h"

namespace qt::QT_ISA {

// partial: one double for each piece of kSumPiece elements.
inline int sum_squares(Pool &pool, double *out, const float *grad, int64_t n, double *partial) {
  const int64_t pieces = ceil_div(n, kSumPiece);
  pool.parallel_for(pieces, [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kSumPiece < n ? (item + 1) * kSumPiece : n;
    Squares squares;
    for (int64_t i = item * kSumPiece; i < end; i += kLanes) squares.add(load_part(grad + i, end - i));
    partial[item] = squares.total();
  });
  double sum = 0.0;
  for (int64_t i = 0; i < pieces; ++i) sum += partial[i];
  *out = sum;
  return QT_OK;
}

inline f32x16 sqrt16(f32x16 x) {
#if defined(__AVX512F__)
  return as<f32x16>(_mm512_sqrt_ps(as<__m512>(x)));
#else
  alignas(64) float v[kLanes];
  store16(v, x);
  for (int64_t i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return load16(v);
#endif
}

// One AdamW step on param, exp_avg, exp_avg_sq [n]; scale, lr, step and skip are read from memory. `copy` (or NULL) gets
// the parameters in bf16. With *skip nothing but the copy is written.
inline int adamw(Pool &pool, float *param, float *exp_avg, float *exp_avg_sq, bf16 *copy, const float *grad,
                 const double *scale, const uint8_t *skip, const double *lr, const int64_t *step, double beta1, double beta2,
                 double eps, double weight_decay, int64_t n) {
  const double t = static_cast<double>(*step + 1);
  const float decay = static_cast<float>(1.0 - *lr * weight_decay);
  const float step_size = static_cast<float>(*lr / (1.0 - std::pow(beta1, t)));
  const float root = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
  const float b1 = static_cast<float>(beta1), b2 = static_cast<float>(beta2), tiny = static_cast<float>(eps);
  const float rest1 = static_cast<float>(1.0 - beta1), rest2 = static_cast<float>(1.0 - beta2);
  const float factor = static_cast<float>(*scale);
  const bool frozen = *skip != 0;
  for_vectors(pool, n, [&](int64_t i, int64_t left) {
    f32x16 p = load_part(param + i, left);
    if (!frozen) {
      const f32x16 g = load_part(grad + i, left) * factor;
      const f32x16 m = load_part(exp_avg + i, left) * b1 + g * rest1;
      const f32x16 v = load_part(exp_avg_sq + i, left) * b2 + g * g * rest2;
      p = p * decay - step_size * (m / (sqrt16(v) / root + tiny));
      store_part(param + i, p, left);
      store_part(exp_avg + i, m, left);
      store_part(exp_avg_sq + i, v, left);
    }
    if (copy) store_part(copy + i, p, left);
  });
  return QT_OK;
}

}  // namespace qt::QT_ISA
