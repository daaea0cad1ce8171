// Output head and cross-entropy on the supervised rows, a chunk of rows at a time: the full logits never exist.
//
// First sweep over the vocabulary: logits of the chunk, with each slice's running maximum and sum of exponentials per row.
// Second sweep: logits turn into their gradient and are multiplied back through the head. The vocabulary is cut into
// kParts fixed parts with an accumulator each, added in order: the thread count changes nothing.
#pragma once

#include <cmath>

#include "common.h"

namespace qt::QT_ISA {

template <class G, class T>
struct Head {
  using elem = typename G::elem;
  using Segment = typename G::Segment;
  static constexpr int64_t kParts = 8;
  static constexpr int64_t kSlice = 512;  // vocabulary rows that are packed at a time

  static int64_t block_elems(int64_t k) { return 32 * G::padded(k); }

  struct Buffers {
    elem *rows;               // [chunk / 32] A blocks over the hidden size
    elem *slice;              // [threads] a slice of the head, either way round
    elem *grads;              // [threads] A block over a slice
    float *tile;              // [threads][32 * kSlice]
    float *top, *sum, *lse;   // [slices * chunk] twice, [chunk]
    float *dx;                // [kParts][chunk / 32][hidden / 32] blocks
    T *gathered;              // [threads][32, hidden]
    Buffers(Scratch &s, int64_t chunk, int64_t hidden, int64_t vocab, int32_t threads) {
      const int64_t blocks = ceil_div(chunk, 32), width = ceil_div(hidden, 32);
      rows = s.take<elem>(blocks * block_elems(hidden));
      slice = s.take<elem>(threads * kSlice * round_up(hidden, 32));
      grads = s.take<elem>(threads * 32 * kSlice);
      tile = s.take<float>(threads * 32 * kSlice);
      top = s.take<float>(ceil_div(vocab, kSlice) * blocks * 32);
      sum = s.take<float>(ceil_div(vocab, kSlice) * blocks * 32);
      lse = s.take<float>(blocks * 32);
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

  // losses [num_rows] =, dhidden [tokens, hidden] = (or NULL). logits: scratch [chunk, vocab].
  static int run(Pool &pool, float *losses, T *dhidden, const T *hidden, const int64_t *rows, const int64_t *targets,
                 int64_t num_rows, const T *head, int64_t tokens, int64_t width, int64_t vocab, float *logits, int64_t chunk,
                 void *memory, size_t bytes) {
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
        const int64_t count = size - m * 32 < 32 ? size - m * 32 : 32;
        for (int64_t r = 0; r < count; ++r)
          std::memcpy(gathered + r * width, hidden + c.rows[m * 32 + r] * width, static_cast<size_t>(width) * sizeof(T));
        G::pack_a(f.rows + m * block_elems(width), gathered, width, count, width);
      });
      logits_of(pool, f, c, logits, head);
      for (int64_t r = 0; r < size; ++r) {
        f.lse[r] = combine(f, c, r);
        losses[at + r] = f.lse[r] - logits[r * vocab + c.targets[r]];
      }
      if (dhidden) gradient_of(pool, f, c, dhidden, logits, head);
    }
    return QT_OK;
  }

  static float combine(const Buffers &f, const Chunk &c, int64_t row) {
    const int64_t slices = ceil_div(c.vocab, kSlice), stride = c.blocks * 32;
    float top = -INFINITY;
    for (int64_t i = 0; i < slices; ++i) top = f.top[i * stride + row] > top ? f.top[i * stride + row] : top;
    double sum = 0.0;
    for (int64_t i = 0; i < slices; ++i) sum += static_cast<double>(f.sum[i * stride + row]) * std::exp(f.top[i * stride + row] - top);
    return top + static_cast<float>(std::log(sum));
  }

  static void logits_of(Pool &pool, const Buffers &f, const Chunk &c, float *logits, const T *head) {
    pool.parallel_for(ceil_div(c.vocab, kSlice), [&](int64_t item, int32_t thread) {
      const int64_t v0 = item * kSlice, width = c.vocab - v0 < kSlice ? c.vocab - v0 : kSlice;
      elem *slice = f.slice + thread * kSlice * round_up(c.hidden, 32);
      float *tile = f.tile + thread * 32 * kSlice;
      for (int64_t b = 0; b * 32 < width; ++b)
        G::pack_b_nt(slice + b * block_elems(c.hidden), head + (v0 + b * 32) * c.hidden, c.hidden,
                     width - b * 32 < 32 ? width - b * 32 : 32, c.hidden);
      G::thread_begin();
      for (int64_t m = 0; m < c.blocks; ++m) {
        for (int64_t b = 0; b * 32 < width; ++b) {
          const Segment segment{f.rows + m * block_elems(c.hidden), slice + b * block_elems(c.hidden), G::padded(c.hidden)};
          G::block(tile + b * 1024, &segment, 1);
        }
        const int64_t count = c.size - m * 32 < 32 ? c.size - m * 32 : 32;
        for (int64_t r = 0; r < count; ++r) {
          float *row = logits + (m * 32 + r) * c.vocab + v0;
          f32x16 top = splat(-INFINITY), sum = splat(0.0f);
          for (int64_t v = 0; v < width; v += kLanes) {
            const f32x16 x = load16(tile + v / 32 * 1024 + r * 32 + v % 32);
            store_part(row + v, x, width - v);
            top = max(top, valid(x, width - v, -INFINITY));
          }
          const float most = max_lanes(top);
          for (int64_t v = 0; v < width; v += kLanes)
            sum += exp16(valid(load16(tile + v / 32 * 1024 + r * 32 + v % 32), width - v, -INFINITY) - most);
          f.top[item * c.blocks * 32 + m * 32 + r] = most;
          f.sum[item * c.blocks * 32 + m * 32 + r] = sum_lanes(sum);
        }
      }
      G::thread_end();
    });
  }

  static f32x16 valid(f32x16 x, int64_t n, float otherwise) {
    if (n >= kLanes) return x;
    for (int64_t i = n; i < kLanes; ++i) x[i] = otherwise;
    return x;
  }

  static void gradient_of(Pool &pool, const Buffers &f, const Chunk &c, T *dhidden, const float *logits, const T *head) {
    const int64_t wide = ceil_div(c.hidden, 32), slices = ceil_div(c.vocab, kSlice), per_part = ceil_div(slices, kParts);
    const int64_t part_size = c.blocks * wide * 1024;
    pool.parallel_for(kParts, [&](int64_t part, int32_t thread) {
      float *dx = f.dx + part * part_size;
      std::memset(dx, 0, static_cast<size_t>(part_size) * sizeof(float));
      elem *slice = f.slice + thread * kSlice * round_up(c.hidden, 32), *grads = f.grads + thread * 32 * kSlice;
      float *tile = f.tile + thread * 32 * kSlice;
      G::thread_begin();
      for (int64_t i = part * per_part; i < (part + 1) * per_part && i < slices; ++i) {
        const int64_t v0 = i * kSlice, width = c.vocab - v0 < kSlice ? c.vocab - v0 : kSlice;
        for (int64_t b = 0; b < wide; ++b)
          G::pack_b_nn(slice + b * 32 * kSlice, head + v0 * c.hidden + b * 32, c.hidden, width,
                       c.hidden - b * 32 < 32 ? c.hidden - b * 32 : 32);
        for (int64_t m = 0; m < c.blocks; ++m) {
          const int64_t count = c.size - m * 32 < 32 ? c.size - m * 32 : 32;
          for (int64_t r = 0; r < count; ++r) {
            const float *row = logits + (m * 32 + r) * c.vocab + v0;
            const float lse = f.lse[m * 32 + r];
            for (int64_t v = 0; v < width; v += kLanes) store_part(tile + r * width + v, exp16(load_part(row + v, width - v) - lse), width - v);
            const int64_t target = c.targets[m * 32 + r] - v0;
            if (target >= 0 && target < width) tile[r * width + target] -= 1.0f;
          }
          G::pack_a(grads, tile, width, count, width);
          for (int64_t b = 0; b < wide; ++b) {
            const Segment segment{grads, slice + b * 32 * kSlice, G::padded(width)};
            G::block(dx + (m * wide + b) * 1024, &segment, 1, true);
          }
        }
      }
      G::thread_end();
    });
    pool.parallel_for(c.blocks, [&](int64_t m, int32_t) {
      const int64_t count = c.size - m * 32 < 32 ? c.size - m * 32 : 32;
      for (int64_t r = 0; r < count; ++r) {
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
};

}  // namespace qt::QT_ISA
