// Attention of one new token a row over the keys and values of its past. An item is one key head of one row: it puts the
// token's key and value into the cache and serves the query heads that read them, so results do not depend on the
// thread count or on other rows.
#pragma once

#include <cmath>

#include "common.h"

namespace qt::QT_ISA {

template <class T>
struct CachedAttention {
  using Shape = qt_attention;
  static constexpr int64_t kHeads = 4;  // query heads at a time whose sums stay in registers

  struct Buffers {
    float *q;        // [heads of a key head, dim], in whole vectors, times scale
    float *weights;  // [heads of a key head, in whole groups][slots, in whole vectors]
    float *key;      // [dim]
    Buffers(Scratch &s, const Shape &shape, int64_t slots) {
      const int64_t heads = round_up(shape.heads / shape.kv_heads, kHeads), dim = round_up(shape.dim, kLanes);
      q = s.take<float>(heads * dim);
      weights = s.take<float>(heads * round_up(slots, kLanes));
      key = s.take<float>(dim);
    }
  };

  static size_t scratch(const Shape &shape, int64_t slots, int32_t threads) {
    Scratch s(nullptr, 0);
    for (int32_t i = 0; i < threads; ++i) Buffers(s, shape, slots);
    return s.used;
  }

  static int run(Pool &pool, T *out, const T *q, const T *k, const T *v, T *keys, T *values, const int64_t *lengths,
                 int64_t rows, int64_t slots, const Shape &shape, void *memory, size_t bytes) {
    const size_t each = scratch(shape, slots, 1);
    if (each * static_cast<size_t>(pool.threads()) > bytes) return QT_SCRATCH_TOO_SMALL;
    const int64_t dim = shape.dim, ld = shape.kv_heads * dim, per_kv = shape.heads / shape.kv_heads;
    pool.parallel_for(rows * shape.kv_heads, [&](int64_t item, int32_t thread) {
      Scratch scratch(static_cast<char *>(memory) + each * static_cast<size_t>(thread), each);
      const Buffers f(scratch, shape, slots);
      const int64_t row = item / shape.kv_heads, kv = item % shape.kv_heads, length = lengths[row];
      const int64_t first = shape.window && length > shape.window ? length - shape.window : 0;
      const int64_t cache = row * slots * ld + kv * dim, last = cache + (length - 1) * ld;
      std::memcpy(keys + last, k + item * dim, static_cast<size_t>(dim) * sizeof(T));
      std::memcpy(values + last, v + item * dim, static_cast<size_t>(dim) * sizeof(T));
      const int64_t head = row * shape.heads + kv * per_kv;
      probabilities(f, shape, q + head * dim, keys + cache + first * ld, length - first);
      for (int64_t h = 0; h < per_kv; h += kHeads)
        weighted_sum(f, shape, out + (head + h) * dim, values + cache + first * ld, length - first, h);
    });
    return QT_OK;
  }

  static int64_t weights_ld(int64_t count) { return round_up(count, kLanes); }

  // f.weights [heads, count] = softmax of scale q k; rows beyond the heads are zero.
  static void probabilities(const Buffers &f, const Shape &s, const T *q, const T *keys, int64_t count) {
    const int64_t heads = s.heads / s.kv_heads, dim = round_up(s.dim, kLanes), ld = weights_ld(count);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < s.dim; d += kLanes)
        store16(f.q + h * dim + d, load_part(q + h * s.dim + d, s.dim - d) * s.scale);
    for (int64_t j = 0; j < count; ++j) {
      const T *key = keys + j * s.kv_heads * s.dim;
      for (int64_t d = 0; d < s.dim; d += kLanes) store16(f.key + d, load_part(key + d, s.dim - d));
      for (int64_t h = 0; h < heads; ++h) {
        f32x16 sum = splat(0.0f);
        for (int64_t d = 0; d < dim; d += kLanes) sum += load16(f.q + h * dim + d) * load16(f.key + d);
        f.weights[h * ld + j] = sum_lanes(sum);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      float *w = f.weights + h * ld;
      for (int64_t j = count; j < ld; ++j) w[j] = -INFINITY;
      f32x16 top = splat(-INFINITY), sum = splat(0.0f);
      for (int64_t j = 0; j < count; j += kLanes) top = max(top, load16(w + j));
      const float most = max_lanes(top);
      for (int64_t j = 0; j < count; j += kLanes) {
        const f32x16 p = exp16(load16(w + j) - most);
        store16(w + j, p);
        sum += p;
      }
      const float factor = 1.0f / sum_lanes(sum);
      for (int64_t j = 0; j < count; j += kLanes) store16(w + j, load16(w + j) * factor);
    }
    const int64_t padded = round_up(heads, kHeads);
    std::memset(f.weights + heads * ld, 0, static_cast<size_t>((padded - heads) * ld) * sizeof(float));
  }

  // out [up to kHeads, dim] = the weights of heads h .. h + kHeads times the values.
  static void weighted_sum(const Buffers &f, const Shape &s, T *out, const T *values, int64_t count, int64_t h) {
    const int64_t heads = s.heads / s.kv_heads - h, ld = weights_ld(count), step = s.kv_heads * s.dim;
    const float *w = f.weights + h * ld;
    for (int64_t d = 0; d < s.dim; d += kLanes) {
      f32x16 sums[kHeads];
      for (f32x16 &sum : sums) sum = splat(0.0f);
      for (int64_t j = 0; j < count; ++j) {
        const f32x16 value = load_part(values + j * step + d, s.dim - d);
        for (int64_t g = 0; g < kHeads; ++g) sums[g] += w[g * ld + j] * value;
      }
      for (int64_t g = 0; g < kHeads && g < heads; ++g) store_part(out + g * s.dim + d, sums[g], s.dim - d);
    }
  }
};

}  // namespace qt::QT_ISA
