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

// A weight slice in a thread's buffer: half of a common second-level cache, and at most this many blocks of columns.
constexpr int64_t kSliceBytes = 1 << 20;
constexpr int64_t kSliceBlocks = 16;

template <class G>
inline int64_t slice_blocks(int64_t reduction, int64_t blocks, int32_t threads) {
  const int64_t fit = kSliceBytes / (reduction * 32 * static_cast<int64_t>(sizeof(typename G::elem)));
  const int64_t most = fit < 1 ? 1 : fit > kSliceBlocks ? kSliceBlocks : fit;
  const int64_t share = ceil_div(blocks, threads);
  return ceil_div(share, ceil_div(share, most));
}

template <class G, class T>
struct Linear {
  using elem = typename G::elem;
  using Segment = typename G::Segment;

  static int64_t block_elems(int64_t k) { return 32 * G::padded(k); }

  static void pack_weight_nt(elem *dst, const qt_weight &w, int64_t n0, int64_t cols) {
    if (w.codes)
      G::template pack_nf4_nt<T>(dst, w, n0, cols);
    else
      G::pack_b_nt(dst, static_cast<const T *>(w.dense) + n0 * w.k, w.k, cols, w.k);
  }
  static void pack_weight_nn(elem *dst, const qt_weight &w, int64_t k0, int64_t cols) {
    if (w.codes)
      G::template pack_nf4_nn<T>(dst, w, k0, cols);
    else
      G::pack_b_nn(dst, static_cast<const T *>(w.dense) + k0, w.k, w.n, cols);
  }

  // ---- forward -----------------------------------------------------------------------------------------------------

  struct Forward {
    elem *x, *slices;
    elem *u[8], *lora_a[8];  // packed [tokens / 32] and [rank / 32] blocks
    float *tiles;
    elem *masked;
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
      slices = s.take<elem>(threads * slice_elems(k, rank));
      tiles = s.take<float>(threads * 1024);
      masked = s.take<elem>(dropout ? threads * block_elems(k) : 0);
    }
    // At most kSliceBlocks blocks and kSliceBytes, at least one block; and the scaled B of the adapter beside it.
    static int64_t slice_elems(int64_t k, int64_t rank) {
      return kSliceBlocks * block_elems(rank) + most_blocks(k) * block_elems(k);
    }
    static int64_t most_blocks(int64_t k) {
      const int64_t fit = kSliceBytes / (k * 32 * static_cast<int64_t>(sizeof(elem)));
      return fit < 1 ? 1 : fit > kSliceBlocks ? kSliceBlocks : fit;
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
        elem *row = dst + r / G::kRows * G::kRows * k + r % G::kRows;
        for (int64_t i = 0; i < k; ++i) row[i * G::kRows] *= dropout_factor(token, i, dropout.p);
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

    int64_t rank = 0, total = 0;
    for (int64_t i = 0; i < count; ++i) {
      total += ceil_div(linears[i].weight.n, 32);
      if (linears[i].rank > rank) rank = linears[i].rank;
    }
    const int64_t per_slice = slice_blocks<G>(G::padded(k), total, pool.threads());
    int64_t first_item[9] = {0};
    for (int64_t i = 0; i < count; ++i)
      first_item[i + 1] = first_item[i] + ceil_div(ceil_div(linears[i].weight.n, 32), per_slice);
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t thread) {
      int64_t i = 0;
      while (item >= first_item[i + 1]) ++i;
      const qt_linear &l = linears[i];
      const int64_t n = l.weight.n, n0 = (item - first_item[i]) * per_slice * 32;
      const int64_t nb = ceil_div(n - n0 < per_slice * 32 ? n - n0 : per_slice * 32, 32);
      elem *slice = f.slices + thread * Forward::slice_elems(k, rank), *up = slice + nb * block_elems(k);
      for (int64_t b = 0; b < nb; ++b) {
        const int64_t at = n0 + b * 32, cols = n - at < 32 ? n - at : 32;
        pack_weight_nt(slice + b * block_elems(k), l.weight, at, cols);
        if (l.rank)
          G::pack_b_nt(up + b * block_elems(l.rank), static_cast<const T *>(l.lora_b) + at * l.rank, l.rank, cols, l.rank,
                       l.scale);
      }
      float *c = f.tiles + thread * 1024;
      G::thread_begin();
      for (int64_t m = 0; m < blocks; ++m) {
        const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
        for (int64_t b = 0; b < nb; ++b) {
          const Segment segments[2] = {
              {f.x + m * block_elems(k), slice + b * block_elems(k), G::padded(k)},
              {f.u[i] + m * block_elems(l.rank), up + b * block_elems(l.rank), l.rank},
          };
          G::block(c, segments, l.rank ? 2 : 1);
          const int64_t at = n0 + b * 32, cols = n - at < 32 ? n - at : 32;
          store_block(static_cast<T *>(l.out) + m * 32 * n + at, n, c, rows, cols,
                      l.bias ? static_cast<const T *>(l.bias) + at : nullptr,
                      residual ? residual + m * 32 * n + at : nullptr);
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
    float *tiles;
    int64_t slice_size, rank;
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
      slice_size = kSliceBlocks * 32 * up + Forward::most_blocks(reduction) * 32 * reduction;
      slices = s.take<elem>(threads * slice_size);
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
    // dx, in slices of its columns.
    const int64_t total = ceil_div(k, 32), per_slice = slice_blocks<G>(reduction, total, pool.threads());
    pool.parallel_for(ceil_div(total, per_slice), [&](int64_t item, int32_t thread) {
      const int64_t b0 = item * per_slice, nb = total - b0 < per_slice ? total - b0 : per_slice;
      elem *slice = f.slices + thread * f.slice_size, *up = slice + nb * 32 * reduction;
      int64_t up_start[9] = {0};
      for (int64_t i = 0; i < count; ++i) up_start[i + 1] = up_start[i] + nb * block_elems(linears[i].rank);
      for (int64_t b = 0; b < nb; ++b) {
        const int64_t k0 = (b0 + b) * 32, cols = k - k0 < 32 ? k - k0 : 32;
        for (int64_t i = 0; i < count; ++i) {
          pack_weight_nn(slice + (b * reduction + start[i]) * 32, linears[i].weight, k0, cols);
          if (linears[i].rank)
            G::pack_b_nn(up + up_start[i] + b * block_elems(linears[i].rank),
                         static_cast<const T *>(linears[i].lora_a) + k0, k, linears[i].rank, cols);
        }
      }
      float *c = f.tiles + thread * 2048, *part = c + 1024;
      G::thread_begin();
      for (int64_t m = 0; m < blocks; ++m) {
        const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
        for (int64_t b = 0; b < nb; ++b) {
          Segment segments[16];
          int used = 0;
          for (int64_t i = 0; i < count; ++i)
            segments[used++] = {f.dout + (m * reduction + start[i]) * 32, slice + (b * reduction + start[i]) * 32,
                                G::padded(linears[i].weight.n)};
          if (!dropout->keys)
            for (int64_t i = 0; i < count; ++i)
              if (linears[i].rank)
                segments[used++] = {f.du_a[i] + m * block_elems(linears[i].rank),
                                    up + up_start[i] + b * block_elems(linears[i].rank), linears[i].rank};
          G::block(c, segments, used);
          const int64_t k0 = (b0 + b) * 32, cols = k - k0 < 32 ? k - k0 : 32;
          if (dropout->keys)
            for (int64_t i = 0; i < count; ++i) {
              if (!linears[i].rank) continue;
              const Segment one{f.du_a[i] + m * block_elems(linears[i].rank),
                                up + up_start[i] + b * block_elems(linears[i].rank), linears[i].rank};
              G::block(part, &one, 1);
              for (int64_t r = 0; r < rows; ++r) {
                const uint32_t token = dropout_token(dropout->keys[m * 32 + r], linears[i].index);
                for (int64_t v = 0; v < cols; ++v) c[r * 32 + v] += dropout_factor(token, k0 + v, dropout->p) * part[r * 32 + v];
              }
            }
          store_block(dx + m * 32 * k + k0, k, c, rows, cols, nullptr, nullptr);
        }
      }
      G::thread_end();
    });
    return QT_OK;
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
