// Output head and cross-entropy on the supervised rows, a chunk of rows at a time. No logit is ever stored: they are made
// twice, a tile at a time, which costs half a product more and saves the traffic of rows x vocabulary floats, each way.
//
// First sweep over the vocabulary: each slice's maximum and sum of exponentials per row, and the target's logit. Second
// sweep: logits again, turned into their gradient and multiplied back through the head while they are in the cache. The
// vocabulary is cut into kParts fixed parts with an accumulator each, added in order: the thread count changes nothing.
#pragma once

#include <cmath>

#include "common.h"

namespace qt::QT_ISA {

template <class G, class T>
struct Head {
  using elem = typename G::elem;
  using Segment = typename G::Segment;
  static constexpr int64_t kParts = 8;
  static constexpr int64_t kSlice = 256;  // vocabulary rows that are packed at a time

  static int64_t block_elems(int64_t k) { return 32 * G::padded(k); }

  struct Buffers {
    elem *rows;              // [chunk / 32] A blocks over the hidden size
    elem *slice, *slice_nn;  // [threads] a slice of the head, either way round
    elem *grads;             // [threads] A block over a slice
    float *tile;             // [threads][32, 32]
    float *top, *sum;        // [slices][chunk]
    float *lse, *wanted;     // [chunk]
    float *dx;               // [kParts][chunk / 32][hidden / 32] blocks
    T *gathered;             // [threads][32, hidden]
    Buffers(Scratch &s, int64_t chunk, int64_t hidden, int64_t vocab, int32_t threads) {
      const int64_t blocks = ceil_div(chunk, 32), width = ceil_div(hidden, 32), slices = ceil_div(vocab, kSlice);
      rows = s.take<elem>(blocks * block_elems(hidden));
      slice = s.take<elem>(threads * kSlice / 32 * block_elems(hidden));
      slice_nn = s.take<elem>(threads * kSlice * width * 32);
      grads = s.take<elem>(threads * 32 * kSlice);
      tile = s.take<float>(threads * 1024);
      top = s.take<float>(slices * blocks * 32);
      sum = s.take<float>(slices * blocks * 32);
      lse = s.take<float>(blocks * 32);
      wanted = s.take<float>(blocks * 32);
      dx = s.take<float>(kParts * blocks * width * 1024);
      gathered = s.take<T>(threads * 32 * hidden);
    }
  };

  static size_t scratch(int64_t chunk, int64_t hidden, int64_t vocab, int32_t threads) {
    Scratch s(nullptr, 0);
    Buffers(s, chunk, hidden, vocab, threads);
    return s.used;
  }

  struct Chunk {
    int64_t size, blocks, hidden, vocab;
    const int64_t *rows, *targets;
  };

  // losses [num_rows] =, dhidden [tokens, hidden] = (or NULL).
  static int run(Pool &pool, float *losses, T *dhidden, const T *hidden, const int64_t *rows, const int64_t *targets,
                 int64_t num_rows, const T *head, int64_t tokens, int64_t width, int64_t vocab, int64_t chunk, void *memory,
                 size_t bytes) {
    Scratch s(memory, bytes);
    const Buffers f(s, chunk, width, vocab, pool.threads());
    if (!s.ok()) return QT_SCRATCH_TOO_SMALL;
    if (dhidden)
      pool.parallel_for(ceil_div(tokens, 64), [&](int64_t item, int32_t) {
        const int64_t count = tokens - item * 64 < 64 ? tokens - item * 64 : 64;
        std::memset(dhidden + item * 64 * width, 0, static_cast<size_t>(count * width) * sizeof(T));
      });
    for (int64_t at = 0; at < num_rows; at += chunk) {
      const int64_t size = num_rows - at < chunk ? num_rows - at : chunk;
      const Chunk c{size, ceil_div(size, 32), width, vocab, rows + at, targets + at};
      pool.parallel_for(c.blocks, [&](int64_t m, int32_t thread) {
        T *gathered = f.gathered + thread * 32 * width;
        const int64_t count = rows_of(c, m);
        for (int64_t r = 0; r < count; ++r)
          std::memcpy(gathered + r * width, hidden + c.rows[m * 32 + r] * width, static_cast<size_t>(width) * sizeof(T));
        G::pack_a(f.rows + m * block_elems(width), gathered, width, count, width);
      });
      statistics(pool, f, c, head);
      for (int64_t r = 0; r < size; ++r) {
        f.lse[r] = combine(f, c, r);
        losses[at + r] = f.lse[r] - f.wanted[r];
      }
      if (dhidden) gradient(pool, f, c, dhidden, head);
    }
    return QT_OK;
  }

  static int64_t rows_of(const Chunk &c, int64_t m) { return c.size - m * 32 < 32 ? c.size - m * 32 : 32; }
  static int64_t width_of(const Chunk &c, int64_t v) { return c.vocab - v < 32 ? c.vocab - v : 32; }

  static float combine(const Buffers &f, const Chunk &c, int64_t row) {
    const int64_t slices = ceil_div(c.vocab, kSlice), stride = c.blocks * 32;
    float top = -INFINITY;
    for (int64_t i = 0; i < slices; ++i) top = f.top[i * stride + row] > top ? f.top[i * stride + row] : top;
    double sum = 0.0;
    for (int64_t i = 0; i < slices; ++i)
      sum += static_cast<double>(f.sum[i * stride + row]) * std::exp(f.top[i * stride + row] - top);
    return top + static_cast<float>(std::log(sum));
  }

  // The slice [v0, v0 + kSlice) of the head as right operands over the hidden size.
  static void pack_slice(elem *slice, const Chunk &c, const T *head, int64_t v0) {
    for (int64_t v = v0; v < v0 + kSlice && v < c.vocab; v += 32, slice += block_elems(c.hidden))
      G::pack_b_nt(slice, head + v * c.hidden, c.hidden, width_of(c, v), c.hidden);
  }
  // tile [32, 32] = logits of block m of the chunk's rows and the slice's block b.
  static void logits(float *tile, const Buffers &f, const Chunk &c, const elem *slice, int64_t m, int64_t b) {
    const Segment segment{f.rows + m * block_elems(c.hidden), slice + b * block_elems(c.hidden), G::padded(c.hidden)};
    G::block(tile, &segment, 1);
  }

  static void statistics(Pool &pool, const Buffers &f, const Chunk &c, const T *head) {
    pool.parallel_for(ceil_div(c.vocab, kSlice), [&](int64_t item, int32_t thread) {
      const int64_t v0 = item * kSlice;
      elem *slice = f.slice + thread * kSlice / 32 * block_elems(c.hidden);
      float *tile = f.tile + thread * 1024;
      pack_slice(slice, c, head, v0);
      G::thread_begin();
      for (int64_t m = 0; m < c.blocks; ++m) {
        const int64_t count = rows_of(c, m);
        float *tops = f.top + item * c.blocks * 32 + m * 32, *sums = f.sum + item * c.blocks * 32 + m * 32;
        for (int64_t r = 0; r < 32; ++r) tops[r] = -INFINITY, sums[r] = 0.0f;
        for (int64_t b = 0; b * 32 < kSlice && v0 + b * 32 < c.vocab; ++b) {
          logits(tile, f, c, slice, m, b);
          const int64_t width = width_of(c, v0 + b * 32);
          for (int64_t r = 0; r < count; ++r) {
            const f32x16 low = valid(load16(tile + r * 32), width), high = valid(load16(tile + r * 32 + 16), width - 16);
            const float top = max_lanes(max(low, high));
            if (top > tops[r]) {
              sums[r] *= std::exp(tops[r] - top);
              tops[r] = top;
            }
            sums[r] += sum_lanes(exp16(low - tops[r]) + exp16(high - tops[r]));
            const int64_t target = c.targets[m * 32 + r] - v0 - b * 32;
            if (target >= 0 && target < width) f.wanted[m * 32 + r] = tile[r * 32 + target];
          }
        }
      }
      G::thread_end();
    });
  }

  // -inf in the lanes beyond the vocabulary.
  static f32x16 valid(f32x16 x, int64_t n) {
    for (int64_t i = n < 0 ? 0 : n; i < kLanes; ++i) x[i] = -INFINITY;
    return x;
  }

  static void gradient(Pool &pool, const Buffers &f, const Chunk &c, T *dhidden, const T *head) {
    const int64_t wide = ceil_div(c.hidden, 32), slices = ceil_div(c.vocab, kSlice), per_part = ceil_div(slices, kParts);
    const int64_t part_size = c.blocks * wide * 1024;
    pool.parallel_for(kParts, [&](int64_t part, int32_t thread) {
      float *dx = f.dx + part * part_size, *tile = f.tile + thread * 1024;
      std::memset(dx, 0, static_cast<size_t>(part_size) * sizeof(float));
      elem *slice = f.slice + thread * kSlice / 32 * block_elems(c.hidden);
      elem *slice_nn = f.slice_nn + thread * kSlice * wide * 32, *grads = f.grads + thread * 32 * kSlice;
      G::thread_begin();
      for (int64_t i = part * per_part; i < (part + 1) * per_part && i < slices; ++i) {
        const int64_t v0 = i * kSlice, width = c.vocab - v0 < kSlice ? c.vocab - v0 : kSlice, blocks = ceil_div(width, 32);
        pack_slice(slice, c, head, v0);
        for (int64_t b = 0; b < blocks; ++b)  // [hidden / 32][slice / 32] blocks
          for (int64_t h = 0; h < wide; ++h)
            G::pack_b_nn(slice_nn + (h * blocks + b) * 1024, head + (v0 + b * 32) * c.hidden + h * 32, c.hidden,
                         width_of(c, v0 + b * 32), c.hidden - h * 32 < 32 ? c.hidden - h * 32 : 32, 32);
        for (int64_t m = 0; m < c.blocks; ++m) {
          for (int64_t b = 0; b < blocks; ++b) {
            logits(tile, f, c, slice, m, b);
            logits_to_gradient(grads + b * 1024, tile, f, c, m, v0 + b * 32);
          }
          for (int64_t h = 0; h < wide; ++h) add_product(dx + (m * wide + h) * 1024, grads, slice_nn + h * blocks * 1024, blocks);
        }
      }
      G::thread_end();
    });
    pool.parallel_for(c.blocks, [&](int64_t m, int32_t) {
      for (int64_t r = 0; r < rows_of(c, m); ++r) {
        T *out = dhidden + c.rows[m * 32 + r] * c.hidden;
        for (int64_t v = 0; v < c.hidden; v += kLanes) {
          f32x16 sum = splat(0.0f);
          for (int64_t part = 0; part < kParts; ++part)
            sum += load16(f.dx + part * part_size + (m * wide + v / 32) * 1024 + r * 32 + v % 32);
          store_part(out + v, sum, c.hidden - v);
        }
      }
    });
  }

  // grads: A block [32 rows, 32 columns from v on] = softmax - onehot of the logits in tile; zero outside.
  static void logits_to_gradient(elem *grads, float *tile, const Buffers &f, const Chunk &c, int64_t m, int64_t v) {
    const int64_t count = rows_of(c, m), width = width_of(c, v);
    for (int64_t r = 0; r < 32; ++r) {
      if (r >= count) {
        G::put_row_a(grads, r, splat(0.0f), splat(0.0f));
        continue;
      }
      const float lse = f.lse[m * 32 + r];
      f32x16 low = exp16(valid(load16(tile + r * 32), width) - lse);
      f32x16 high = exp16(valid(load16(tile + r * 32 + 16), width - 16) - lse);
      const int64_t target = c.targets[m * 32 + r] - v;
      if (target >= 0 && target < 16) low[target] -= 1.0f;
      if (target >= 16 && target < 32) high[target - 16] -= 1.0f;
      G::put_row_a(grads, r, low, high);
    }
  }

  // c [32, 32] += A B over `blocks` blocks of 32.
  static void add_product(float *c, const elem *a, const elem *b, int64_t blocks) {
    Segment segments[kSlice / 32];
    for (int64_t i = 0; i < blocks; ++i) segments[i] = Segment{a + i * 1024, b + i * 1024, 32};
    G::block(c, segments, static_cast<int>(blocks), true);
  }
};

}  // namespace qt::QT_ISA
