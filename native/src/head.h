// Output head and cross-entropy on the supervised rows, a chunk of rows at a time.
//
// First sweep over the vocabulary: each slice's maximum, exponentials and their sum per row, and the target's logit. Kept
// are the exponentials, not the logits: below 1, they lose no more than half a unit in the last place of bf16, where a
// logit of 20 would lose 0.06. Second sweep: exponentials become the logits' gradient and go back through the head. The
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
    elem *exps;              // [slices][chunk / 32][slice / 32] A blocks: e^(logit - top), then the logits' gradient
    float *tiles;            // [threads][slice / 32][32, 32]
    float *top, *sum;        // [slices][chunk]
    float *lse, *wanted;     // [chunk]
    float *dx;               // [kParts][chunk / 32][hidden / 32] blocks
    T *gathered;             // [threads][32, hidden]
    Buffers(Scratch &s, int64_t chunk, int64_t hidden, int64_t vocab, int32_t threads) {
      const int64_t blocks = ceil_div(chunk, 32), width = ceil_div(hidden, 32), slices = ceil_div(vocab, kSlice);
      rows = s.take<elem>(blocks * block_elems(hidden));
      slice = s.take<elem>(threads * kSlice / 32 * block_elems(hidden));
      slice_nn = s.take<elem>(threads * kSlice * width * 32);
      exps = s.take<elem>(slices * blocks * 32 * kSlice);
      tiles = s.take<float>(threads * 32 * kSlice);
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
      statistics(pool, f, c, head, dhidden != nullptr);
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
  static int64_t slice_width(const Chunk &c, int64_t slice) {
    return c.vocab - slice * kSlice < kSlice ? c.vocab - slice * kSlice : kSlice;
  }

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

  static elem *exps_of(const Buffers &f, const Chunk &c, int64_t slice, int64_t m) {
    return f.exps + (slice * c.blocks + m) * 32 * kSlice;
  }

  static void statistics(Pool &pool, const Buffers &f, const Chunk &c, const T *head, bool keep) {
    pool.parallel_for(ceil_div(c.vocab, kSlice), [&](int64_t item, int32_t thread) {
      const int64_t v0 = item * kSlice, width = slice_width(c, item);
      elem *slice = f.slice + thread * kSlice / 32 * block_elems(c.hidden);
      float *tiles = f.tiles + thread * 32 * kSlice;
      pack_slice(slice, c, head, v0);
      G::thread_begin();
      for (int64_t m = 0; m < c.blocks; ++m) {
        for (int64_t b = 0; b * 32 < width; ++b) {
          const Segment segment{f.rows + m * block_elems(c.hidden), slice + b * block_elems(c.hidden), G::padded(c.hidden)};
          G::block(tiles + b * 1024, &segment, 1);
        }
        for (int64_t r = 0; r < rows_of(c, m); ++r) {
          const int64_t target = c.targets[m * 32 + r] - v0;
          if (target >= 0 && target < width) f.wanted[m * 32 + r] = tiles[target / 32 * 1024 + r * 32 + target % 32];
        }
        exponentials(tiles, f, c, item, m, width, keep);
      }
      G::thread_end();
    });
  }

  // Each row's maximum over the slice and sum of e^(logit - maximum); the summands themselves too when `keep`.
  static void exponentials(const float *tiles, const Buffers &f, const Chunk &c, int64_t item, int64_t m, int64_t width,
                           bool keep) {
    elem *exps = exps_of(f, c, item, m);
    for (int64_t r = 0; r < 32; ++r) {
      const bool there = r < rows_of(c, m);  // a row that is not there gets zeros
      f32x16 most = splat(-INFINITY), sum = splat(0.0f);
      for (int64_t v = 0; there && v < width; v += kLanes)
        most = max(most, valid(load16(tiles + v / 32 * 1024 + r * 32 + v % 32), width - v));
      const float top = max_lanes(most);
      for (int64_t b = 0; b * 32 < width; ++b) {
        f32x16 e[2] = {splat(0.0f), splat(0.0f)};
        for (int64_t v = 0; there && v < 2; ++v) {
          e[v] = exp16(valid(load16(tiles + b * 1024 + r * 32 + v * 16), width - b * 32 - v * 16) - top);
          sum += e[v];
        }
        if (keep) G::put_row_a(exps + b * 1024, r, e[0], e[1]);
      }
      f.top[(item * c.blocks + m) * 32 + r] = top;
      f.sum[(item * c.blocks + m) * 32 + r] = sum_lanes(sum);
    }
  }

  // -inf in the lanes beyond the vocabulary.
  static f32x16 valid(f32x16 x, int64_t n) {
    if (n >= kLanes) return x;
    return select(lane_numbers() < static_cast<int32_t>(n), x, splat(-INFINITY));
  }

  static void gradient(Pool &pool, const Buffers &f, const Chunk &c, T *dhidden, const T *head) {
    const int64_t wide = ceil_div(c.hidden, 32), slices = ceil_div(c.vocab, kSlice), per_part = ceil_div(slices, kParts);
    const int64_t part_size = c.blocks * wide * 1024;
    pool.parallel_for(kParts, [&](int64_t part, int32_t thread) {
      float *dx = f.dx + part * part_size;
      std::memset(dx, 0, static_cast<size_t>(part_size) * sizeof(float));
      elem *slice_nn = f.slice_nn + thread * kSlice * wide * 32;
      G::thread_begin();
      for (int64_t i = part * per_part; i < (part + 1) * per_part && i < slices; ++i) {
        const int64_t v0 = i * kSlice, blocks = ceil_div(slice_width(c, i), 32);
        for (int64_t b = 0; b < blocks; ++b)  // [hidden / 32][slice / 32] blocks
          for (int64_t h = 0; h < wide; ++h)
            G::pack_b_nn(slice_nn + (h * blocks + b) * 1024, head + (v0 + b * 32) * c.hidden + h * 32, c.hidden,
                         width_of(c, v0 + b * 32), c.hidden - h * 32 < 32 ? c.hidden - h * 32 : 32, 32);
        for (int64_t m = 0; m < c.blocks; ++m) {
          elem *grads = exps_of(f, c, i, m);
          exps_to_gradient(grads, f, c, i, m);
          for (int64_t h = 0; h < wide; ++h)
            add_product(dx + (m * wide + h) * 1024, grads, slice_nn + h * blocks * 1024, blocks);
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

  // softmax - onehot in place of the exponentials: softmax = e^(logit - top) e^(top - lse). The target's own entry comes
  // from its fp32 logit: near a sure prediction, softmax - 1 would be all rounding error.
  static void exps_to_gradient(elem *exps, const Buffers &f, const Chunk &c, int64_t slice, int64_t m) {
    for (int64_t r = 0; r < rows_of(c, m); ++r) {
      const float factor = std::exp(f.top[(slice * c.blocks + m) * 32 + r] - f.lse[m * 32 + r]);
      const int64_t target = c.targets[m * 32 + r] - slice * kSlice;
      for (int64_t b = 0; b * 32 < slice_width(c, slice); ++b) {
        f32x16 low, high;
        G::get_row_a(exps + b * 1024, r, &low, &high);
        G::put_row_a(exps + b * 1024, r, low * factor, high * factor);
      }
      if (target < 0 || target >= kSlice) continue;
      const float own = std::expm1(f.wanted[m * 32 + r] - f.lse[m * 32 + r]);
      G::at_a(exps + target / 32 * 1024, r, target % 32) = from_float<elem>(own);
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
