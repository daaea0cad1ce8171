// Linear layers that share an input: NF4 or plain weight, bias, LoRA with optional dropout, residual. Forward and backward.
//
// Both directions pack the shared operand (x, or the gradients) once, then split the other dimension of the output into
// slices: a slice of the weight is dequantised into a thread's buffer (sized for its cache) and multiplied with all
// tokens. The adapter's up product is one more segment of the same reduction. Every output element is computed by one
// thread in one order, so results do not depend on the thread count.
#pragma once

#include "common.h"
#include "dropout.h"
#include "nf4.h"

namespace qt::QT_ISA {

// A weight slice in a thread's buffer: half of a common second-level cache, and at most this many blocks of 32 columns.
constexpr int64_t kSliceBytes = 1 << 20;
constexpr int64_t kSliceBlocks = 16;
constexpr int64_t kFewBlocks = 6;

// How the columns of an output and its reduction are cut: slices of `blocks` column blocks, over `length` of the reduction at
// a time. That is all of it while a slice then holds more than a few blocks. Beyond, the other operand would be read from
// memory once for each few columns (at Qwen2.5-0.5B's shape the backward fell from 77 to 55 % of the product peak), so
// sums are kept in memory between the lengths instead.
struct Cut {
  int64_t length, blocks;
};
template <class G>
inline Cut cut(int64_t reduction, int64_t blocks, int32_t threads) {
  constexpr int64_t kRow = 32 * static_cast<int64_t>(sizeof(typename G::elem));
  const bool whole = kSliceBytes / (reduction * kRow) >= kFewBlocks;
  const int64_t length = whole ? reduction : kSliceBytes / (kSliceBlocks * kRow);
  const int64_t fit = kSliceBytes / (length * kRow), most = fit > kSliceBlocks ? kSliceBlocks : fit;
  const int64_t share = ceil_div(blocks, threads);
  return {length, ceil_div(share, ceil_div(share, most))};
}
// Elements of a thread's slice, and floats of a thread's sums where the reduction is cut.
template <class G>
inline int64_t slice_elems(int64_t reduction) {
  const int64_t all = kSliceBlocks * 32 * reduction, fit = kSliceBytes / static_cast<int64_t>(sizeof(typename G::elem));
  return all < fit ? all : fit;
}
template <class G>
inline int64_t sum_floats(int64_t reduction, int64_t row_blocks) {
  return cut<G>(reduction, 1, 1).length < reduction ? row_blocks * kSliceBlocks * 1024 : 0;
}

template <class G, class T>
struct Linear {
  using elem = typename G::elem;
  using Segment = typename G::Segment;

  static int64_t block_elems(int64_t k) { return 32 * G::padded(k); }

  // Both over the part of the reduction from `from` to `to`.
  static void pack_weight_nt(elem *dst, const qt_weight &w, int64_t n0, int64_t cols, int64_t from, int64_t to) {
    if (w.codes)
      G::template pack_nf4_nt<T>(dst, w, n0, cols, from, to);
    else
      G::pack_b_nt(dst, static_cast<const T *>(w.dense) + n0 * w.k + from, w.k, cols, to - from);
  }
  static void pack_weight_nn(elem *dst, const qt_weight &w, int64_t k0, int64_t cols, int64_t from, int64_t to) {
    if (w.codes)
      G::template pack_nf4_nn<T>(dst, w, k0, cols, from, to);
    else
      G::pack_b_nn(dst, static_cast<const T *>(w.dense) + from * w.k + k0, w.k, to - from, cols);
  }

  // ---- forward -----------------------------------------------------------------------------------------------------

  struct Forward {
    elem *x, *slices;
    elem *u[8], *lora_a[8];  // packed [tokens / 32] and [rank / 32] blocks
    float *tiles, *sums;
    elem *masked;
    int64_t slice_size, sums_size;
    Forward(Scratch &s, const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads, bool dropout) {
      const int64_t k = linears[0].weight.k, blocks = ceil_div(tokens, 32);
      int64_t rank = 0;
      x = s.take<elem>(blocks * block_elems(k));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = linears[i].rank;
        if (r > rank) rank = r;
        u[i] = s.take<elem>(r ? blocks * block_elems(r) : 0);
        lora_a[i] = s.take<elem>(r ? ceil_div(r, 32) * block_elems(k) : 0);
      }
      slice_size = slice_elems<G>(G::padded(k)) + kSliceBlocks * block_elems(rank);  // and the scaled B of the adapter
      sums_size = sum_floats<G>(G::padded(k), blocks);
      slices = s.take<elem>(threads * slice_size);
      tiles = s.take<float>(threads * 1024);
      sums = s.take<float>(threads * sums_size);
      masked = s.take<elem>(dropout ? threads * block_elems(k) : 0);
    }
  };

  static size_t forward_scratch(const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads, bool dropout) {
    Scratch s(nullptr, 0);
    Forward(s, linears, count, tokens, threads, dropout);
    return s.used;
  }

  // u_i = mask x A_i^T for all adapters, into u [tokens, r] and packed for the up product. `x` packed on the way when
  // `pack_x`.
  static void down(Pool &pool, const Forward &f, const T *x, const qt_linear *linears, int64_t count, int64_t tokens,
                   const qt_dropout *dropout, bool pack_x) {
    const int64_t k = linears[0].weight.k, blocks = ceil_div(tokens, 32);
    pool.parallel_for(count, [&](int64_t i, int32_t) {
      const qt_linear &l = linears[i];
      for (int64_t j = 0; j * 32 < l.rank; ++j)
        G::pack_b_nt(f.lora_a[i] + j * block_elems(k), static_cast<const T *>(l.lora_a) + j * 32 * k, k,
                     l.rank - j * 32 < 32 ? l.rank - j * 32 : 32, k);
    });
    pool.parallel_for(blocks, [&](int64_t m, int32_t thread) {
      const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
      elem *packed = f.x + m * block_elems(k);
      float *c = f.tiles + thread * 1024;
      if (pack_x || !dropout->keys) G::pack_a(packed, x + m * 32 * k, k, rows, k);
      G::thread_begin();
      for (int64_t i = 0; i < count; ++i) {
        const qt_linear &l = linears[i];
        if (!l.rank) continue;
        const elem *input = packed;
        if (dropout->keys) {
          elem *masked = f.masked + thread * block_elems(k);
          pack_masked(masked, x + m * 32 * k, k, rows, *dropout, m * 32, l.index);
          input = masked;
        }
        T *u = static_cast<T *>(l.u) + m * 32 * l.rank;
        for (int64_t j = 0; j * 32 < l.rank; ++j) {
          const Segment segment{input, f.lora_a[i] + j * block_elems(k), G::padded(k)};
          const int64_t cols = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
          G::block(c, &segment, 1, false, rows, cols);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t n = 0; n < cols; n += kLanes)
              store_part(u + r * l.rank + j * 32 + n, load16(c + r * 32 + n), cols - n);
        }
        G::pack_a(f.u[i] + m * block_elems(l.rank), u, l.rank, rows, l.rank);
      }
      G::thread_end();
    });
  }

  static void pack_masked(elem *dst, const T *x, int64_t k, int64_t rows, const qt_dropout &dropout, int64_t first,
                          int32_t index) {
    constexpr int64_t kPiece = 256;  // columns at a time: the masked copy stays on the stack
    alignas(64) T piece[32 * kPiece];
    // Packing is by steps of k, so a piece can be packed on its own only where the layout is step-major for all rows.
    if constexpr (sizeof(elem) == 2) {
      for (int64_t at = 0; at < k; at += kPiece) {
        const int64_t width = k - at < kPiece ? k - at : kPiece;
        for (int64_t r = 0; r < rows; ++r)
          mask_row(piece + r * width, x + r * k + at, dropout, dropout.keys[first + r], index, at, width);
        G::pack_a(dst + at * 32, piece, width, rows, width);
      }
    } else {
      G::pack_a(dst, x, k, rows, k);
      for (int64_t r = 0; r < rows; ++r) {
        const uint32_t token = dropout_token(dropout.keys[first + r], index);
        elem *row = G::row_a(dst, r, k);
        for (int64_t i = 0; i < k; ++i) row[i * G::panel_of(r).rows] *= dropout_factor(token, i, dropout.p);
      }
    }
  }

  // outs = x W^T + bias + s u B^T (+ residual, for a group of one).
  static int forward(Pool &pool, const T *x, const qt_linear *linears, int64_t count, const T *residual, int64_t tokens,
                     const qt_dropout *dropout, void *memory, size_t bytes) {
    Scratch scratch(memory, bytes);
    const Forward f(scratch, linears, count, tokens, pool.threads(), dropout->keys != nullptr);
    if (!scratch.ok()) return QT_SCRATCH_TOO_SMALL;
    const int64_t k = linears[0].weight.k, blocks = ceil_div(tokens, 32);
    down(pool, f, x, linears, count, tokens, dropout, true);

    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += ceil_div(linears[i].weight.n, 32);
    const Cut by = cut<G>(G::padded(k), total, pool.threads());
    int64_t first_item[9] = {0};
    for (int64_t i = 0; i < count; ++i)
      first_item[i + 1] = first_item[i] + ceil_div(ceil_div(linears[i].weight.n, 32), by.blocks);
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t thread) {
      int64_t i = 0;
      while (item >= first_item[i + 1]) ++i;
      const qt_linear &l = linears[i];
      const int64_t n = l.weight.n, n0 = (item - first_item[i]) * by.blocks * 32;
      const int64_t nb = ceil_div(n - n0 < by.blocks * 32 ? n - n0 : by.blocks * 32, 32);
      elem *slice = f.slices + thread * f.slice_size, *up = slice + slice_elems<G>(G::padded(k));
      for (int64_t b = 0; l.rank && b < nb; ++b) {
        const int64_t at = n0 + b * 32, cols = n - at < 32 ? n - at : 32;
        G::pack_b_nt(up + b * block_elems(l.rank), static_cast<const T *>(l.lora_b) + at * l.rank, l.rank, cols, l.rank,
                     l.scale);
      }
      G::thread_begin();
      for (int64_t from = 0; from < k; from += by.length) {
        const int64_t to = k - from < by.length ? k : from + by.length;
        for (int64_t b = 0; b < nb; ++b) {
          const int64_t at = n0 + b * 32;
          pack_weight_nt(slice + b * 32 * by.length, l.weight, at, n - at < 32 ? n - at : 32, from, to);
        }
        for (int64_t m = 0; m < blocks; ++m) {
          const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
          for (int64_t b = 0; b < nb; ++b) {
            float *c = f.sums_size ? f.sums + thread * f.sums_size + (m * nb + b) * 1024 : f.tiles + thread * 1024;
            const Segment segments[2] = {
                {f.x + m * block_elems(k), slice + b * 32 * by.length, G::padded(to - from), G::padded(k), from},
                {f.u[i] + m * block_elems(l.rank), up + b * block_elems(l.rank), l.rank},
            };
            G::block(c, segments, to == k && l.rank ? 2 : 1, from > 0);
            if (to < k) continue;
            const int64_t at = n0 + b * 32, cols = n - at < 32 ? n - at : 32;
            store_block(static_cast<T *>(l.out) + m * 32 * n + at, n, c, rows, cols,
                        l.bias ? static_cast<const T *>(l.bias) + at : nullptr,
                        residual ? residual + m * 32 * n + at : nullptr);
          }
        }
      }
      G::thread_end();
    });
    return QT_OK;
  }

  static void store_block(T *out, int64_t ld, const float *c, int64_t rows, int64_t cols, const T *bias,
                          const T *residual) {
    for (int64_t v = 0; v < cols; v += kLanes) {
      const f32x16 b = bias ? load_part(bias + v, cols - v) : splat(0.0f);
      for (int64_t r = 0; r < rows; ++r) {
        f32x16 value = load16(c + r * 32 + v) + b;
        if (residual) value += load_part(residual + r * ld + v, cols - v);
        store_part(out + r * ld + v, value, cols - v);
      }
    }
  }

  static int lora_down(Pool &pool, const T *x, const qt_linear *linears, int64_t count, int64_t tokens,
                       const qt_dropout *dropout, void *memory, size_t bytes) {
    Scratch scratch(memory, bytes);
    const Forward f(scratch, linears, count, tokens, pool.threads(), dropout->keys != nullptr);
    if (!scratch.ok()) return QT_SCRATCH_TOO_SMALL;
    down(pool, f, x, linears, count, tokens, dropout, false);
    return QT_OK;
  }

  // ---- backward ----------------------------------------------------------------------------------------------------

  // Tokens are cut into kParts fixed parts with gradient accumulators of their own, added in order at the end: a part reads
  // its rows of x and dout once, a group of kGroup blocks of 32 at a time, and the thread count changes nothing.
  static constexpr int64_t kParts = 8, kGroup = 4;
  static int64_t rank_blocks(const qt_linear &l) { return ceil_div(l.rank, 32); }

  struct Backward {
    elem *dout;               // [tokens / 32][layers of the group] blocks
    elem *du_a[8];            // s dout B, packed for dx
    elem *lora_b[8];          // B, packed for du
    T *du;                    // [threads][kGroup * 32, widest rank]
    elem *du_t, *u_t;         // [threads][widest rank / 32] blocks: transposed, the reduction runs over a group's tokens
    float *grads[8];          // [kParts][rank / 32][k / 32 + n / 32] blocks of 32 x 32
    elem *slices, *columns;
    float *tiles, *sums;
    int64_t slice_size, sums_size, rank;
    Backward(Scratch &s, const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads) {
      const int64_t blocks = ceil_div(tokens, 32);
      int64_t reduction = 0, up = 0;
      rank = 0;
      for (int64_t i = 0; i < count; ++i) reduction += G::padded(linears[i].weight.n);
      dout = s.take<elem>(blocks * 32 * reduction);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = linears[i].rank, n = linears[i].weight.n;
        up += G::padded(r);
        if (r > rank) rank = r;
        du_a[i] = s.take<elem>(r ? blocks * block_elems(r) : 0);
        lora_b[i] = s.take<elem>(rank_blocks(linears[i]) * block_elems(n));
        grads[i] = s.take<float>(kParts * grad_size(linears[i]));
      }
      du = s.take<T>(threads * kGroup * 32 * rank);
      du_t = s.take<elem>(threads * ceil_div(rank, 32) * block_elems(kGroup * 32));
      u_t = s.take<elem>(threads * ceil_div(rank, 32) * block_elems(kGroup * 32));
      slice_size = slice_elems<G>(reduction) + kSliceBlocks * 32 * up;
      sums_size = sum_floats<G>(reduction, blocks);
      slices = s.take<elem>(threads * slice_size);
      sums = s.take<float>(threads * sums_size);
      columns = s.take<elem>(threads * block_elems(kGroup * 32));
      tiles = s.take<float>(threads * 2048);
    }
    static int64_t grad_size(const qt_linear &l) {
      return rank_blocks(l) * (ceil_div(l.weight.k, 32) + ceil_div(l.weight.n, 32)) * 1024;
    }
  };

  static size_t backward_scratch(const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads) {
    Scratch s(nullptr, 0);
    Backward(s, linears, count, tokens, threads);
    return s.used;
  }

  // dx = sum_i (dout_i W_i + mask (s du_i A_i)); dA_i += s du_i^T (mask x); dB_i += s dout_i^T u_i, where du_i is
  // dout_i B_i and `out` of each linear holds dout_i.
  static int backward(Pool &pool, T *dx, const T *x, const qt_linear *linears, int64_t count, int64_t tokens,
                      const qt_dropout *dropout, void *memory, size_t bytes) {
    Scratch scratch(memory, bytes);
    const Backward f(scratch, linears, count, tokens, pool.threads());
    if (!scratch.ok()) return QT_SCRATCH_TOO_SMALL;
    const int64_t k = linears[0].weight.k, blocks = ceil_div(tokens, 32);
    int64_t start[9] = {0};
    for (int64_t i = 0; i < count; ++i) start[i + 1] = start[i] + G::padded(linears[i].weight.n);
    const int64_t reduction = start[count];

    pool.parallel_for(count, [&](int64_t i, int32_t) {
      const qt_linear &l = linears[i];
      for (int64_t j = 0; j < rank_blocks(l); ++j)
        G::pack_b_nn(f.lora_b[i] + j * block_elems(l.weight.n), static_cast<const T *>(l.lora_b) + j * 32, l.rank,
                     l.weight.n, l.rank - j * 32 < 32 ? l.rank - j * 32 : 32);
    });
    const int64_t groups = ceil_div(blocks, kGroup), per_part = ceil_div(groups, kParts);
    const int64_t parts = ceil_div(groups, per_part);
    pool.parallel_for(parts, [&](int64_t part, int32_t thread) {
      G::thread_begin();
      for (int64_t g = part * per_part; g < (part + 1) * per_part && g < groups; ++g)
        backward_group(f, x, linears, count, tokens, *dropout, start, g, part, thread, g == part * per_part);
      G::thread_end();
    });
    add_parts(pool, f, linears, count, parts);
    const int64_t total = ceil_div(k, 32);
    const Cut by = cut<G>(reduction, total, pool.threads());
    pool.parallel_for(ceil_div(total, by.blocks), [&](int64_t item, int32_t thread) {
      const int64_t b0 = item * by.blocks, nb = total - b0 < by.blocks ? total - b0 : by.blocks;
      G::thread_begin();
      for (int64_t from = 0; from < reduction; from += by.length)
        backward_slice(f, dx, linears, count, tokens, *dropout, start, by, b0, nb, from, thread);
      G::thread_end();
    });
    return QT_OK;
  }

  // Column blocks b0 .. b0 + nb of dx, over `by.length` of the reduction from `from` on; the last of these also adds the
  // adapters' share and stores.
  static void backward_slice(const Backward &f, T *dx, const qt_linear *linears, int64_t count, int64_t tokens,
                             const qt_dropout &dropout, const int64_t *start, Cut by, int64_t b0, int64_t nb, int64_t from,
                             int32_t thread) {
    const int64_t k = linears[0].weight.k, reduction = start[count];
    const int64_t to = reduction - from < by.length ? reduction : from + by.length;
    const bool last = to == reduction;
    elem *slice = f.slices + thread * f.slice_size, *up = slice + slice_elems<G>(reduction);
    int64_t up_start[9] = {0}, begin[8], end[8];  // of each linear's rows in this length
    for (int64_t i = 0; i < count; ++i) {
      up_start[i + 1] = up_start[i] + nb * block_elems(linears[i].rank);
      begin[i] = (from > start[i] ? from : start[i]) - start[i];
      end[i] = (to < start[i + 1] ? to : start[i + 1]) - start[i];
    }
    for (int64_t b = 0; b < nb; ++b) {
      const int64_t k0 = (b0 + b) * 32, cols = k - k0 < 32 ? k - k0 : 32;
      for (int64_t i = 0; i < count; ++i) {
        const qt_linear &l = linears[i];
        if (begin[i] < end[i])
          pack_weight_nn(slice + (b * by.length + start[i] + begin[i] - from) * 32, l.weight, k0, cols, begin[i],
                         end[i] < l.weight.n ? end[i] : l.weight.n);
        if (last && l.rank)
          G::pack_b_nn(up + up_start[i] + b * block_elems(l.rank), static_cast<const T *>(l.lora_a) + k0, k, l.rank, cols);
      }
    }
    float *part = f.tiles + thread * 2048 + 1024;
    for (int64_t m = 0; m * 32 < tokens; ++m) {
      const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
      for (int64_t b = 0; b < nb; ++b) {
        float *c = f.sums_size ? f.sums + thread * f.sums_size + (m * nb + b) * 1024 : f.tiles + thread * 2048;
        Segment segments[16];
        int used = 0;
        for (int64_t i = 0; i < count; ++i)
          if (begin[i] < end[i])
            segments[used++] = {f.dout + (m * reduction + start[i]) * 32,
                                slice + (b * by.length + start[i] + begin[i] - from) * 32, end[i] - begin[i],
                                G::padded(linears[i].weight.n), begin[i]};
        const auto adapter = [&](int64_t i) {
          const int64_t r = linears[i].rank;
          return Segment{f.du_a[i] + m * block_elems(r), up + up_start[i] + b * block_elems(r), r};
        };
        for (int64_t i = 0; last && !dropout.keys && i < count; ++i)
          if (linears[i].rank) segments[used++] = adapter(i);
        G::block(c, segments, used, from > 0);
        if (!last) continue;
        const int64_t k0 = (b0 + b) * 32, cols = k - k0 < 32 ? k - k0 : 32;
        for (int64_t i = 0; dropout.keys && i < count; ++i) {
          if (!linears[i].rank) continue;
          const Segment one = adapter(i);
          G::block(part, &one, 1);
          for (int64_t r = 0; r < rows; ++r) {
            const uint32_t token = dropout_token(dropout.keys[m * 32 + r], linears[i].index);
            for (int64_t v = 0; v < cols; ++v) c[r * 32 + v] += dropout_factor(token, k0 + v, dropout.p) * part[r * 32 + v];
          }
        }
        store_block(dx + m * 32 * k + k0, k, c, rows, cols, nullptr, nullptr);
      }
    }
  }

  // Packs one group's gradients, du = s dout B on the way, and adds the group's share of dA and dB to its part.
  static void backward_group(const Backward &f, const T *x, const qt_linear *linears, int64_t count, int64_t tokens,
                             const qt_dropout &dropout, const int64_t *start, int64_t g, int64_t part, int32_t thread,
                             bool first) {
    const int64_t k = linears[0].weight.k, t0 = g * kGroup * 32, wide = ceil_div(k, 32);
    const int64_t size = tokens - t0 < kGroup * 32 ? tokens - t0 : kGroup * 32;
    const int64_t t_elems = ceil_div(f.rank, 32) * block_elems(kGroup * 32);
    float *c = f.tiles + thread * 2048;
    T *du = f.du + thread * kGroup * 32 * f.rank;
    elem *columns = f.columns + thread * block_elems(kGroup * 32);
    elem *du_t = f.du_t + thread * t_elems, *u_t = f.u_t + thread * t_elems;
    for (int64_t i = 0; i < count; ++i) {
      const qt_linear &l = linears[i];
      const int64_t n = l.weight.n, r = l.rank;
      const T *dout = static_cast<const T *>(l.out) + t0 * n;
      for (int64_t m = 0; m * 32 < size; ++m) {
        const int64_t rows = size - m * 32 < 32 ? size - m * 32 : 32;
        elem *packed = f.dout + ((g * kGroup + m) * start[count] + start[i]) * 32;
        G::pack_a(packed, dout + m * 32 * n, n, rows, n);
        for (int64_t j = 0; j < rank_blocks(l); ++j) {
          const Segment segment{packed, f.lora_b[i] + j * block_elems(n), G::padded(n)};
          const int64_t cols = r - j * 32 < 32 ? r - j * 32 : 32;
          G::block(c, &segment, 1, false, rows, cols);
          for (int64_t row = 0; row < rows; ++row)
            for (int64_t v = 0; v < cols; v += kLanes)
              store_part(du + (m * 32 + row) * r + j * 32 + v, load16(c + row * 32 + v) * l.scale, cols - v);
        }
        if (r) G::pack_a(f.du_a[i] + (g * kGroup + m) * block_elems(r), du + m * 32 * r, r, rows, r);
      }
      if (!r) continue;
      for (int64_t j = 0; j < rank_blocks(l); ++j) {
        const int64_t cols = r - j * 32 < 32 ? r - j * 32 : 32;
        G::pack_a_t(du_t + j * block_elems(kGroup * 32), du + j * 32, r, size, cols, kGroup * 32);
        G::pack_a_t(u_t + j * block_elems(kGroup * 32), static_cast<const T *>(l.u) + t0 * r + j * 32, r, size, cols,
                    kGroup * 32);
      }
      float *grad = f.grads[i] + part * Backward::grad_size(l);
      for (int64_t b = 0; b < wide; ++b) {
        const int64_t cols = k - b * 32 < 32 ? k - b * 32 : 32;
        if (dropout.keys)
          pack_masked_columns(columns, x, k, b * 32, cols, t0, size, dropout, l.index);
        else
          G::pack_b_nn(columns, x + t0 * k + b * 32, k, size, cols, kGroup * 32);
        grad = add_group(grad, columns, du_t, r, cols, first);
      }
      for (int64_t b = 0; b * 32 < n; ++b) {
        const int64_t cols = n - b * 32 < 32 ? n - b * 32 : 32;
        G::pack_b_nn(columns, dout + b * 32, n, size, cols, kGroup * 32);
        grad = add_group(grad, columns, u_t, r, cols, first);
      }
    }
  }

  // One column block's share, for every 32 of the rank; returns where the next column block's starts.
  static float *add_group(float *grad, const elem *columns, const elem *left, int64_t rank, int64_t cols, bool first) {
    for (int64_t j = 0; j * 32 < rank; ++j, grad += 1024) {
      const Segment segment{left + j * block_elems(kGroup * 32), columns, kGroup * 32};
      G::block(grad, &segment, 1, !first, rank - j * 32, cols);
    }
    return grad;
  }

  // The parts in order, into the flat gradients: dA [r, k] as it is, dB [n, r] transposed and scaled.
  static void add_parts(Pool &pool, const Backward &f, const qt_linear *linears, int64_t count, int64_t parts) {
    int64_t first_item[9] = {0};
    for (int64_t i = 0; i < count; ++i)
      first_item[i + 1] = first_item[i] + ceil_div(linears[i].weight.k, 32) + ceil_div(linears[i].weight.n, 32);
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t thread) {
      int64_t i = 0;
      while (item >= first_item[i + 1]) ++i;
      const qt_linear &l = linears[i];
      const int64_t k = l.weight.k, wide = ceil_div(k, 32), b = item - first_item[i], size = Backward::grad_size(l);
      float *sum = f.tiles + thread * 2048;
      for (int64_t j = 0; j < rank_blocks(l); ++j) {
        const float *grad = f.grads[i] + (b * rank_blocks(l) + j) * 1024;
        const int64_t rows = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
        for (int64_t e = 0; e < rows * 32; e += kLanes) {
          f32x16 total = load16(grad + e);
          for (int64_t part = 1; part < parts; ++part) total += load16(grad + part * size + e);
          store16(sum + e, total);
        }
        if (b < wide) {
          const int64_t cols = k - b * 32 < 32 ? k - b * 32 : 32;
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < cols; ++v) l.grad_a[(j * 32 + r) * k + b * 32 + v] += sum[r * 32 + v];
        } else {
          const int64_t n0 = (b - wide) * 32, cols = l.weight.n - n0 < 32 ? l.weight.n - n0 : 32;
          for (int64_t v = 0; v < cols; ++v)
            for (int64_t r = 0; r < rows; ++r) l.grad_b[(n0 + v) * l.rank + j * 32 + r] += l.scale * sum[r * 32 + v];
        }
      }
    });
  }

  // Columns k0 .. k0 + cols of `size` masked rows of x, from t0 on.
  static void pack_masked_columns(elem *dst, const T *x, int64_t k, int64_t k0, int64_t cols, int64_t t0, int64_t size,
                                  const qt_dropout &dropout, int32_t index) {
    alignas(64) T rows[kGroup * 32 * 32];
    for (int64_t r = 0; r < size; ++r)
      mask_row(rows + r * 32, x + (t0 + r) * k + k0, dropout, dropout.keys[t0 + r], index, k0, cols);
    G::pack_b_nn(dst, rows, 32, size, cols, kGroup * 32);
  }
};

}  // namespace qt::QT_ISA
