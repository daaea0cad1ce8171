// Row-wise ops: RMSNorm, RoPE, SwiGLU, embedding. Formulas in ops/<op>; sums of a row in 16 fixed lanes.
#pragma once

#include <cmath>

#include "common.h"

namespace qt::QT_ISA {

constexpr int64_t kRowsPerItem = 16;

template <class Body>
inline void for_rows(Pool &pool, int64_t rows, const Body &body) {
  pool.parallel_for(ceil_div(rows, kRowsPerItem), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kRowsPerItem < rows ? (item + 1) * kRowsPerItem : rows;
    for (int64_t row = item * kRowsPerItem; row < end; ++row) body(row);
  });
}

template <class T>
int rms_norm_forward(Pool &pool, T *out, float *rstd, const T *x, const float *weight, float eps, int64_t rows, int64_t d) {
  for_rows(pool, rows, [&](int64_t row) {
    const T *in = x + row * d;
    f32x16 squares = splat(0.0f);
    for (int64_t i = 0; i < d; i += kLanes) {
      const f32x16 v = load_part(in + i, d - i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(d) + eps);
    rstd[row] = scale;
    for (int64_t i = 0; i < d; i += kLanes)
      store_part(out + row * d + i, load_part(in + i, d - i) * scale * load_part(weight + i, d - i), d - i);
  });
  return QT_OK;
}

template <class T>
int rms_norm_backward(Pool &pool, T *dx, float *dweight, const T *dout, const T *x, const float *rstd, const float *weight,
                      const T *residual, int64_t rows, int64_t d) {
  if (dweight)  // by columns, each summed over the rows in order; before dx, which may be dout
    pool.parallel_for(ceil_div(d, kLanes), [&](int64_t item, int32_t) {
      const int64_t i = item * kLanes;
      f32x16 sum = splat(0.0f);
      for (int64_t row = 0; row < rows; ++row)
        sum += load_part(dout + row * d + i, d - i) * load_part(x + row * d + i, d - i) * rstd[row];
      store_part(dweight + i, load_part(dweight + i, d - i) + sum, d - i);
    });
  for_rows(pool, rows, [&](int64_t row) {
    const T *in = x + row * d, *grad = dout + row * d;
    const float scale = rstd[row];
    f32x16 dot = splat(0.0f);
    for (int64_t i = 0; i < d; i += kLanes)
      dot += load_part(grad + i, d - i) * load_part(weight + i, d - i) * load_part(in + i, d - i);
    const float mean = sum_lanes(dot) / static_cast<float>(d) * scale * scale;
    for (int64_t i = 0; i < d; i += kLanes) {
      const f32x16 g = load_part(grad + i, d - i) * load_part(weight + i, d - i);
      f32x16 value = (g - load_part(in + i, d - i) * mean) * scale;
      if (residual) value += load_part(residual + row * d + i, d - i);
      store_part(dx + row * d + i, value, d - i);
    }
  });
  return QT_OK;
}

// x [tokens, heads, d] rotated in place by cos, sin [tokens, half]; sign -1 turns it back.
template <class T>
int rope(Pool &pool, T *x, const float *cos, const float *sin, float sign, int64_t tokens, int64_t heads, int64_t d,
         int64_t half) {
  for_rows(pool, tokens, [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) {
      T *low = x + (t * heads + h) * d, *high = low + half;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const f32x16 c = load_part(cos + t * half + i, n), s = load_part(sin + t * half + i, n) * sign;
        const f32x16 a = load_part(low + i, n), b = load_part(high + i, n);
        store_part(low + i, a * c - b * s, n);
        store_part(high + i, b * c + a * s, n);
      }
    }
  });
  return QT_OK;
}

// exp is cut at e^80: far beyond where 1 / (1 + e^-x) is below every float that matters, and far from overflow.
QT_INLINE f32x16 sigmoid16(f32x16 x) { return reciprocal16(1.0f + exp16(min(-x, splat(80.0f)))); }

// Flat over n elements, in pieces that do not depend on the thread count.
template <class Body>
inline void for_vectors(Pool &pool, int64_t n, const Body &body) {
  constexpr int64_t kPiece = 1 << 14;
  pool.parallel_for(ceil_div(n, kPiece), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kPiece < n ? (item + 1) * kPiece : n;
    for (int64_t i = item * kPiece; i < end; i += kLanes) body(i, end - i);
  });
}

template <class T>
int swiglu_forward(Pool &pool, T *out, const T *gate, const T *up, int64_t n) {
  for_vectors(pool, n, [&](int64_t i, int64_t left) {
    const f32x16 g = load_part(gate + i, left);
    store_part(out + i, g * sigmoid16(g) * load_part(up + i, left), left);
  });
  return QT_OK;
}

template <class T>
int swiglu_backward(Pool &pool, T *dgate, T *dup, const T *dout, const T *gate, const T *up, int64_t n) {
  for_vectors(pool, n, [&](int64_t i, int64_t left) {
    const f32x16 g = load_part(gate + i, left), u = load_part(up + i, left), d = load_part(dout + i, left);
    const f32x16 s = sigmoid16(g);
    store_part(dgate + i, d * u * s * (1.0f + g * (1.0f - s)), left);
    store_part(dup + i, d * g * s, left);
  });
  return QT_OK;
}

// out [rows, d] = rows of table named by ids. Raises no error: the caller has checked the ids.
template <class T>
int embedding(Pool &pool, T *out, const int64_t *ids, const T *table, int64_t rows, int64_t d) {
  for_rows(pool, rows,
           [&](int64_t row) { std::memcpy(out + row * d, table + ids[row] * d, static_cast<size_t>(d) * sizeof(T)); });
  return QT_OK;
}

}  // namespace qt::QT_ISA
