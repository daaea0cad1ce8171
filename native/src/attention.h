// Causal grouped-query attention over a packed stream, forward and backward, in blocks of 32 queries x 32 keys.
//
// Everything is computed transposed, S^T = K Q^T: a vector holds 16 queries, so that row maxima, sums, lse and delta are
// plain vector operations, and P^T, dS^T come out as the left operands that dV = P^T dO and dK = dS^T Q need. A task is one
// (row of the stream, key head): it owns that head's dK and dV, whatever the thread count.
#pragma once

#include <cmath>

#include "common.h"

namespace qt::QT_ISA {

template <class G, class T>
struct Attention {
  using elem = typename G::elem;
  using Segment = typename G::Segment;
  static constexpr int64_t kGroup = 4;  // query blocks whose dK, dV contributions share one long reduction

  static int64_t block_elems(int64_t k) { return 32 * G::padded(k); }
  static constexpr int64_t kSquare = 32 * 32;

  using Shape = qt_attention;
  static int64_t dim_blocks(const Shape &s) { return ceil_div(s.dim, 32); }
  // The first key block that a query block can see.
  static int64_t first_block(const Shape &s, int64_t m) {
    const int64_t key = s.window ? m * 32 - s.window + 1 : 0;
    return key > 0 ? key / 32 : 0;
  }

  static int64_t longest(const int64_t *cu_seqlens, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < rows; ++i) most = cu_seqlens[i + 1] - cu_seqlens[i] > most ? cu_seqlens[i + 1] - cu_seqlens[i] : most;
    return most;
  }

  // Whether the scores of key block j and query block m need a mask.
  static bool is_edge(const Shape &s, int64_t j, int64_t m) {
    return j == m || (s.window && j * 32 <= m * 32 + 31 - s.window);
  }
  // -inf where the query (lanes, from `query`) must not see key `key`.
  static f32x16 masked(const Shape &s, f32x16 score, int64_t key, int64_t query) {
    const i32x16 lane = lane_numbers() + static_cast<int32_t>(query);
    const int32_t k = static_cast<int32_t>(key);
    auto hidden = lane < k;
    if (s.window) hidden |= lane >= k + static_cast<int32_t>(s.window);
    return select(hidden, splat(-INFINITY), score);
  }

  // c [32 dims][32 queries] to rows of out, each times its query's factor.
  static void store_transposed(T *out, int64_t ld, const float *c, int64_t queries, int64_t dims, const float *factor) {
    alignas(64) float rows[kSquare];
    G::transpose(rows, c);
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t d = 0; d < dims; d += kLanes)
        store_part(out + q * ld + d, load16(rows + q * 32 + d) * factor[q], dims - d);
  }

  // ---- forward -----------------------------------------------------------------------------------------------------

  struct ForwardScratch {
    elem *keys;    // [S / 32] A blocks over dim
    elem *values;  // [S / 32][dim / 32] A blocks of V^T over 32 keys
    elem *query, *probs;
    float *scores, *tile;
    Segment *segments;
    ForwardScratch(Scratch &s, const Shape &shape, int64_t length) {
      const int64_t blocks = ceil_div(length, 32);
      keys = s.take<elem>(blocks * block_elems(shape.dim));
      values = s.take<elem>(blocks * dim_blocks(shape) * kSquare);
      query = s.take<elem>(block_elems(shape.dim));
      probs = s.take<elem>(blocks * kSquare);
      scores = s.take<float>(blocks * kSquare);
      tile = s.take<float>(kSquare);
      segments = s.take<Segment>(blocks);
    }
  };

  static size_t forward_scratch(const Shape &shape, int64_t length, int32_t threads) {
    Scratch s(nullptr, 0);
    for (int32_t i = 0; i < threads; ++i) ForwardScratch(s, shape, length);
    return s.used;
  }

  static int forward(Pool &pool, T *out, float *lse, const T *q, const T *k, const T *v, const int64_t *cu_seqlens,
                     int64_t rows, const Shape &shape, void *memory, size_t bytes) {
    const int64_t length = longest(cu_seqlens, rows);
    const size_t each = forward_scratch(shape, length, 1);
    if (each * static_cast<size_t>(pool.threads()) > bytes) return QT_SCRATCH_TOO_SMALL;
    pool.parallel_for(rows * shape.kv_heads, [&](int64_t item, int32_t thread) {
      Scratch scratch(static_cast<char *>(memory) + each * static_cast<size_t>(thread), each);
      const ForwardScratch f(scratch, shape, length);
      const int64_t row = item / shape.kv_heads, kv = item % shape.kv_heads, start = cu_seqlens[row];
      const int64_t size = cu_seqlens[row + 1] - start, blocks = ceil_div(size, 32);
      const int64_t per_kv = shape.heads / shape.kv_heads, ld = shape.heads * shape.dim, kv_ld = shape.kv_heads * shape.dim, dims = dim_blocks(shape);
      const T *keys = k + start * kv_ld + kv * shape.dim, *values = v + start * kv_ld + kv * shape.dim;
      G::thread_begin();
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t count = size - j * 32 < 32 ? size - j * 32 : 32;
        G::pack_a(f.keys + j * block_elems(shape.dim), keys + j * 32 * kv_ld, kv_ld, count, shape.dim);
        for (int64_t d = 0; d < dims; ++d)
          G::pack_a_t(f.values + (j * dims + d) * kSquare, values + j * 32 * kv_ld + d * 32, kv_ld, count,
                      shape.dim - d * 32 < 32 ? shape.dim - d * 32 : 32, 32);
      }
      for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; ++h)
        for (int64_t m = 0; m < blocks; ++m)
          forward_block(f, shape, out + start * ld + h * shape.dim, lse + start * shape.heads + h,
                        q + start * ld + h * shape.dim, ld, size, m);
      G::thread_end();
    });
    return QT_OK;
  }

  static void forward_block(const ForwardScratch &f, const Shape &s, T *out, float *lse, const T *q, int64_t ld,
                            int64_t size, int64_t m) {
    const int64_t queries = size - m * 32 < 32 ? size - m * 32 : 32, first = first_block(s, m), dims = dim_blocks(s);
    G::pack_b_nt(f.query, q + m * 32 * ld, ld, queries, s.dim);
    f32x16 top[2] = {splat(-INFINITY), splat(-INFINITY)}, sum[2] = {splat(0.0f), splat(0.0f)};
    for (int64_t j = first; j <= m; ++j) {
      float *scores = f.scores + j * kSquare;
      const Segment segment{f.keys + j * block_elems(s.dim), f.query, G::padded(s.dim)};
      G::block(scores, &segment, 1);
      const bool edge = is_edge(s, j, m);
      for (int64_t r = 0; r < 32; ++r)
        for (int v = 0; v < 2; ++v) {
          f32x16 x = load16(scores + r * 32 + v * 16) * s.scale;
          if (edge) x = masked(s, x, j * 32 + r, m * 32 + v * 16);
          store16(scores + r * 32 + v * 16, x);
          top[v] = max(top[v], x);
        }
    }
    for (int64_t j = first; j <= m; ++j) {
      float *scores = f.scores + j * kSquare;
      for (int64_t r = 0; r < 32; r += 2) {
        f32x16 p[4];
        for (int v = 0; v < 4; ++v) {
          p[v] = exp16(load16(scores + r * 32 + v * 16) - top[v % 2]);
          sum[v % 2] += p[v];
        }
        G::put_pair_b(f.probs + j * kSquare, r, p[0], p[1], p[2], p[3]);
      }
    }
    alignas(64) float totals[32], tops[32], factor[32];
    for (int v = 0; v < 2; ++v) {
      store16(totals + v * 16, sum[v]);
      store16(tops + v * 16, top[v]);
      store16(factor + v * 16, 1.0f / sum[v]);
    }
    for (int64_t i = 0; i < queries; ++i) lse[(m * 32 + i) * s.heads] = tops[i] + std::log(totals[i]);
    for (int64_t d = 0; d < dims; ++d) {
      int count = 0;
      for (int64_t j = first; j <= m; ++j)
        f.segments[count++] = Segment{f.values + (j * dims + d) * kSquare, f.probs + j * kSquare, 32};
      G::block(f.tile, f.segments, count);
      store_transposed(out + m * 32 * ld + d * 32, ld, f.tile, queries, s.dim - d * 32 < 32 ? s.dim - d * 32 : 32, factor);
    }
  }

  // ---- backward ----------------------------------------------------------------------------------------------------

  struct BackwardScratch {
    elem *keys, *values;  // [S / 32] A blocks over dim
    elem *keys_t;         // [S / 32][dim / 32] A blocks of K^T over 32 keys
    float *dk, *dv;       // [S / 32][dim / 32] blocks of 32 keys x 32 dims
    elem *q_nt, *do_nt;   // [group] B blocks over dim
    elem *q_nn, *do_nn;   // [group][dim / 32] B blocks over 32 queries
    elem *p, *ds;         // [group] A blocks of P^T and dS^T for one key block
    elem *ds_b;           // [group][S / 32] B blocks of dS^T over 32 keys
    float *lse, *delta;   // [group * 32]
    float *score, *dp, *tile;
    Segment *segments;
    BackwardScratch(Scratch &s, const Shape &shape, int64_t length) {
      const int64_t blocks = ceil_div(length, 32), dims = dim_blocks(shape);
      keys = s.take<elem>(blocks * block_elems(shape.dim));
      values = s.take<elem>(blocks * block_elems(shape.dim));
      keys_t = s.take<elem>(blocks * dims * kSquare);
      dk = s.take<float>(blocks * dims * kSquare);
      dv = s.take<float>(blocks * dims * kSquare);
      q_nt = s.take<elem>(kGroup * block_elems(shape.dim));
      do_nt = s.take<elem>(kGroup * block_elems(shape.dim));
      q_nn = s.take<elem>(kGroup * dims * kSquare);
      do_nn = s.take<elem>(kGroup * dims * kSquare);
      p = s.take<elem>(kGroup * kSquare);
      ds = s.take<elem>(kGroup * kSquare);
      ds_b = s.take<elem>(kGroup * blocks * kSquare);
      lse = s.take<float>(kGroup * 32);
      delta = s.take<float>(kGroup * 32);
      score = s.take<float>(kSquare);
      dp = s.take<float>(kSquare);
      tile = s.take<float>(kSquare);
      segments = s.take<Segment>(blocks > kGroup ? blocks : kGroup);
    }
  };

  static size_t backward_scratch(const Shape &shape, int64_t length, int32_t threads) {
    Scratch s(nullptr, 0);
    for (int32_t i = 0; i < threads; ++i) BackwardScratch(s, shape, length);
    return s.used;
  }

  static int backward(Pool &pool, T *dq, T *dk, T *dv, const T *dout, const T *out, const float *lse, const T *q,
                      const T *k, const T *v, const int64_t *cu_seqlens, int64_t rows, const Shape &shape, void *memory,
                      size_t bytes) {
    const int64_t length = longest(cu_seqlens, rows);
    const size_t each = backward_scratch(shape, length, 1);
    if (each * static_cast<size_t>(pool.threads()) > bytes) return QT_SCRATCH_TOO_SMALL;
    pool.parallel_for(rows * shape.kv_heads, [&](int64_t item, int32_t thread) {
      Scratch scratch(static_cast<char *>(memory) + each * static_cast<size_t>(thread), each);
      const BackwardScratch f(scratch, shape, length);
      const int64_t row = item / shape.kv_heads, kv = item % shape.kv_heads, start = cu_seqlens[row];
      const int64_t size = cu_seqlens[row + 1] - start, blocks = ceil_div(size, 32), dims = dim_blocks(shape);
      const int64_t per_kv = shape.heads / shape.kv_heads, ld = shape.heads * shape.dim, kv_ld = shape.kv_heads * shape.dim;
      const T *keys = k + start * kv_ld + kv * shape.dim, *values = v + start * kv_ld + kv * shape.dim;
      G::thread_begin();
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t count = size - j * 32 < 32 ? size - j * 32 : 32;
        G::pack_a(f.keys + j * block_elems(shape.dim), keys + j * 32 * kv_ld, kv_ld, count, shape.dim);
        G::pack_a(f.values + j * block_elems(shape.dim), values + j * 32 * kv_ld, kv_ld, count, shape.dim);
        for (int64_t d = 0; d < dims; ++d)
          G::pack_a_t(f.keys_t + (j * dims + d) * kSquare, keys + j * 32 * kv_ld + d * 32, kv_ld, count,
                      shape.dim - d * 32 < 32 ? shape.dim - d * 32 : 32, 32);
      }
      std::memset(f.dk, 0, static_cast<size_t>(blocks * dims * kSquare) * sizeof(float));
      std::memset(f.dv, 0, static_cast<size_t>(blocks * dims * kSquare) * sizeof(float));
      for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; ++h) {
        const int64_t at = start * ld + h * shape.dim;
        for (int64_t m = 0; m < blocks; m += kGroup)
          backward_group(f, shape, dq + at, dout + at, out + at, lse + start * shape.heads + h, q + at, ld, size, m,
                         m + kGroup < blocks ? m + kGroup : blocks);
      }
      for (int64_t j = 0; j < blocks; ++j)
        for (int64_t d = 0; d < dims; ++d) {
          const int64_t count = size - j * 32 < 32 ? size - j * 32 : 32, cols = shape.dim - d * 32 < 32 ? shape.dim - d * 32 : 32;
          const int64_t to = (start + j * 32) * kv_ld + kv * shape.dim + d * 32;
          store_rows(dk + to, kv_ld, f.dk + (j * dims + d) * kSquare, count, cols);
          store_rows(dv + to, kv_ld, f.dv + (j * dims + d) * kSquare, count, cols);
        }
      G::thread_end();
    });
    return QT_OK;
  }

  static void store_rows(T *out, int64_t ld, const float *c, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < cols; v += kLanes) store_part(out + r * ld + v, load16(c + r * 32 + v), cols - v);
  }

  // Query blocks begin .. end of one head: dQ of those, and their share of dK and dV.
  static void backward_group(const BackwardScratch &f, const Shape &s, T *dq, const T *dout, const T *out, const float *lse,
                             const T *q, int64_t ld, int64_t size, int64_t begin, int64_t end) {
    const int64_t dims = dim_blocks(s), dim_elems = block_elems(s.dim), blocks = ceil_div(size, 32);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t g = m - begin, queries = size - m * 32 < 32 ? size - m * 32 : 32;
      const T *qm = q + m * 32 * ld, *dm = dout + m * 32 * ld, *om = out + m * 32 * ld;
      G::pack_b_nt(f.q_nt + g * dim_elems, qm, ld, queries, s.dim);
      G::pack_b_nt(f.do_nt + g * dim_elems, dm, ld, queries, s.dim);
      for (int64_t d = 0; d < dims; ++d) {
        const int64_t cols = s.dim - d * 32 < 32 ? s.dim - d * 32 : 32;
        G::pack_b_nn(f.q_nn + (g * dims + d) * kSquare, qm + d * 32, ld, queries, cols, 32);
        G::pack_b_nn(f.do_nn + (g * dims + d) * kSquare, dm + d * 32, ld, queries, cols, 32);
      }
      for (int64_t i = 0; i < 32; ++i) {
        // A query that is not there: lse = +inf makes its probabilities 0.
        f.lse[g * 32 + i] = i < queries ? lse[(m * 32 + i) * s.heads] : INFINITY;
        f32x16 dot = splat(0.0f);
        for (int64_t d = 0; i < queries && d < s.dim; d += kLanes)
          dot += load_part(dm + i * ld + d, s.dim - d) * load_part(om + i * ld + d, s.dim - d);
        f.delta[g * 32 + i] = sum_lanes(dot);
      }
    }
    for (int64_t j = first_block(s, begin); j < end; ++j) {
      const int64_t from = j > begin ? j : begin;
      int64_t to = end;
      while (s.window && to > from && first_block(s, to - 1) > j) --to;
      for (int64_t m = from; m < to; ++m) {
        const int64_t g = m - begin;
        const Segment score{f.keys + j * dim_elems, f.q_nt + g * dim_elems, G::padded(s.dim)};
        const Segment dp{f.values + j * dim_elems, f.do_nt + g * dim_elems, G::padded(s.dim)};
        G::block(f.score, &score, 1);
        G::block(f.dp, &dp, 1);
        const bool edge = is_edge(s, j, m);
        const f32x16 lse16[2] = {load16(f.lse + g * 32), load16(f.lse + g * 32 + 16)};
        const f32x16 delta16[2] = {load16(f.delta + g * 32), load16(f.delta + g * 32 + 16)};
        for (int64_t r = 0; r < 32; r += 2) {
          f32x16 p[4], ds[4];
          for (int v = 0; v < 4; ++v) {
            f32x16 x = load16(f.score + r * 32 + v * 16) * s.scale;
            if (edge) x = masked(s, x, j * 32 + r + v / 2, m * 32 + v % 2 * 16);
            p[v] = exp16(x - lse16[v % 2]);
            ds[v] = p[v] * (load16(f.dp + r * 32 + v * 16) - delta16[v % 2]) * s.scale;
          }
          G::put_row_a(f.p + g * kSquare, r, p[0], p[1]);
          G::put_row_a(f.p + g * kSquare, r + 1, p[2], p[3]);
          G::put_row_a(f.ds + g * kSquare, r, ds[0], ds[1]);
          G::put_row_a(f.ds + g * kSquare, r + 1, ds[2], ds[3]);
          G::put_pair_b(f.ds_b + (g * blocks + j) * kSquare, r, ds[0], ds[1], ds[2], ds[3]);
        }
      }
      if (from >= to) continue;
      for (int64_t d = 0; d < dims; ++d) {
        int count = 0;
        for (int64_t g = from - begin; g < to - begin; ++g)
          f.segments[count++] = Segment{f.p + g * kSquare, f.do_nn + (g * dims + d) * kSquare, 32};
        G::block(f.dv + (j * dims + d) * kSquare, f.segments, count, true);
        count = 0;
        for (int64_t g = from - begin; g < to - begin; ++g)
          f.segments[count++] = Segment{f.ds + g * kSquare, f.q_nn + (g * dims + d) * kSquare, 32};
        G::block(f.dk + (j * dims + d) * kSquare, f.segments, count, true);
      }
    }
    alignas(64) float ones[32];
    for (float &one : ones) one = 1.0f;
    for (int64_t m = begin; m < end; ++m)
      for (int64_t d = 0; d < dims; ++d) {
        int count = 0;
        for (int64_t j = first_block(s, m); j <= m; ++j)
          f.segments[count++] =
              Segment{f.keys_t + (j * dims + d) * kSquare, f.ds_b + ((m - begin) * blocks + j) * kSquare, 32};
        G::block(f.tile, f.segments, count);
        const int64_t queries = size - m * 32 < 32 ? size - m * 32 : 32;
        store_transposed(dq + m * 32 * ld + d * 32, ld, f.tile, queries, s.dim - d * 32 < 32 ? s.dim - d * 32 : 32, ones);
      }
  }
};

}  // namespace qt::QT_ISA
