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

// Bytes of a weight slice in a thread's buffer: half of a common second-level cache.
constexpr int64_t kSliceBytes = 1 << 20;

template <class G>
inline int64_t slice_blocks(int64_t reduction, int64_t blocks, int32_t threads) {
  const int64_t fit = kSliceBytes / (reduction * 32 * static_cast<int64_t>(sizeof(typename G::elem)));
  const int64_t most = fit < 1 ? 1 : fit > 8 ? 8 : fit;
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
    // At most 8 blocks and kSliceBytes, at least one block; and the scaled B of the adapter beside it.
    static int64_t slice_elems(int64_t k, int64_t rank) { return 8 * block_elems(rank) + most_blocks(k) * block_elems(k); }
    static int64_t most_blocks(int64_t k) {
      const int64_t fit = kSliceBytes / (k * 32 * static_cast<int64_t>(sizeof(elem)));
      return fit < 1 ? 1 : fit > 8 ? 8 : fit;
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
          G::block(c, &segment, 1);
          const int64_t cols = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
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
              {f.u[i] + m * block_elems(l.rank), up + b * block_elems(l.rank), G::padded(l.rank)},
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

  struct Backward {
    elem *dout;         // [tokens / 32][layers of the group] blocks
    T *du[8];           // [tokens, r]
    elem *du_a[8];      // packed for dx
    elem *lora_b[8];    // packed for du
    elem *du_t[8], *u_t[8];  // packed transposed, for dA and dB: the reduction runs over tokens
    elem *slices;
    elem *columns;
    float *tiles;
    int64_t slice_size;
    Backward(Scratch &s, const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads) {
      const int64_t blocks = ceil_div(tokens, 32);
      int64_t reduction = 0, up = 0;
      for (int64_t i = 0; i < count; ++i) reduction += G::padded(linears[i].weight.n);
      dout = s.take<elem>(blocks * 32 * reduction);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = linears[i].rank, n = linears[i].weight.n;
        up += G::padded(r);
        du[i] = s.take<T>(tokens * r);
        du_a[i] = s.take<elem>(r ? blocks * block_elems(r) : 0);
        lora_b[i] = s.take<elem>(r ? ceil_div(r, 32) * block_elems(n) : 0);
        du_t[i] = s.take<elem>(r ? ceil_div(r, 32) * block_elems(tokens) : 0);
        u_t[i] = s.take<elem>(r ? ceil_div(r, 32) * block_elems(tokens) : 0);
      }
      slice_size = 8 * 32 * up + Forward::most_blocks(reduction) * 32 * reduction;
      slices = s.take<elem>(threads * slice_size);
      columns = s.take<elem>(threads * block_elems(tokens));
      tiles = s.take<float>(threads * 2048);
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
      for (int64_t j = 0; j * 32 < l.rank; ++j)
        G::pack_b_nn(f.lora_b[i] + j * block_elems(l.weight.n), static_cast<const T *>(l.lora_b) + j * 32, l.rank,
                     l.weight.n, l.rank - j * 32 < 32 ? l.rank - j * 32 : 32);
    });
    // Pack the gradients; du = s dout B.
    pool.parallel_for(blocks, [&](int64_t m, int32_t thread) {
      const int64_t rows = tokens - m * 32 < 32 ? tokens - m * 32 : 32;
      float *c = f.tiles + thread * 2048;
      G::thread_begin();
      for (int64_t i = 0; i < count; ++i) {
        const qt_linear &l = linears[i];
        const int64_t n = l.weight.n;
        elem *packed = f.dout + (m * reduction + start[i]) * 32;
        G::pack_a(packed, static_cast<const T *>(l.out) + m * 32 * n, n, rows, n);
        if (!l.rank) continue;
        T *du = f.du[i] + m * 32 * l.rank;
        for (int64_t j = 0; j * 32 < l.rank; ++j) {
          const Segment segment{packed, f.lora_b[i] + j * block_elems(n), G::padded(n)};
          G::block(c, &segment, 1);
          const int64_t cols = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < cols; v += kLanes)
              store_part(du + r * l.rank + j * 32 + v, load16(c + r * 32 + v) * l.scale, cols - v);
        }
        G::pack_a(f.du_a[i] + m * block_elems(l.rank), du, l.rank, rows, l.rank);
      }
      G::thread_end();
    });
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
                                    up + up_start[i] + b * block_elems(linears[i].rank), G::padded(linears[i].rank)};
          G::block(c, segments, used);
          const int64_t k0 = (b0 + b) * 32, cols = k - k0 < 32 ? k - k0 : 32;
          if (dropout->keys)
            for (int64_t i = 0; i < count; ++i) {
              if (!linears[i].rank) continue;
              const Segment one{f.du_a[i] + m * block_elems(linears[i].rank),
                                up + up_start[i] + b * block_elems(linears[i].rank), G::padded(linears[i].rank)};
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
    adapter_gradients(pool, f, x, linears, count, tokens, dropout);
    return QT_OK;
  }

  // dA^ and dB: the reduction runs over all tokens, one block of columns of x (or dout) at a time.
  static void adapter_gradients(Pool &pool, const Backward &f, const T *x, const qt_linear *linears, int64_t count,
                                int64_t tokens, const qt_dropout *dropout) {
    const int64_t k = linears[0].weight.k;
    pool.parallel_for(2 * count, [&](int64_t item, int32_t) {
      const qt_linear &l = linears[item / 2];
      elem *dst = item % 2 ? f.u_t[item / 2] : f.du_t[item / 2];
      const T *src = item % 2 ? static_cast<const T *>(l.u) : f.du[item / 2];
      for (int64_t j = 0; j * 32 < l.rank; ++j)
        G::pack_a_t(dst + j * block_elems(tokens), src + j * 32, l.rank, tokens, l.rank - j * 32 < 32 ? l.rank - j * 32 : 32);
    });
    // Items: first the columns of x, then those of each dout.
    int64_t first_item[9] = {ceil_div(k, 32)};
    for (int64_t i = 0; i < count; ++i) first_item[i + 1] = first_item[i] + ceil_div(linears[i].weight.n, 32);
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t thread) {
      elem *columns = f.columns + thread * block_elems(tokens);
      float *c = f.tiles + thread * 2048;
      G::thread_begin();
      if (item < first_item[0]) {
        const int64_t k0 = item * 32, cols = k - k0 < 32 ? k - k0 : 32;
        if (!dropout->keys) G::pack_b_nn(columns, x + k0, k, tokens, cols);
        for (int64_t i = 0; i < count; ++i) {
          const qt_linear &l = linears[i];
          if (!l.rank) continue;
          if (dropout->keys) pack_masked_columns(columns, x, k, k0, cols, tokens, *dropout, l.index);
          for (int64_t j = 0; j * 32 < l.rank; ++j) {
            const Segment segment{f.du_t[i] + j * block_elems(tokens), columns, G::padded(tokens)};
            G::block(c, &segment, 1);
            const int64_t rows = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t v = 0; v < cols; ++v) l.grad_a[(j * 32 + r) * k + k0 + v] += c[r * 32 + v];
          }
        }
      } else {
        int64_t i = 0;
        while (item >= first_item[i + 1]) ++i;
        const qt_linear &l = linears[i];
        if (l.rank) {
          const int64_t n = l.weight.n, n0 = (item - first_item[i]) * 32, cols = n - n0 < 32 ? n - n0 : 32;
          G::pack_b_nn(columns, static_cast<const T *>(l.out) + n0, n, tokens, cols);
          for (int64_t j = 0; j * 32 < l.rank; ++j) {
            const Segment segment{f.u_t[i] + j * block_elems(tokens), columns, G::padded(tokens)};
            G::block(c, &segment, 1);
            const int64_t rows = l.rank - j * 32 < 32 ? l.rank - j * 32 : 32;
            for (int64_t v = 0; v < cols; ++v)
              for (int64_t r = 0; r < rows; ++r) l.grad_b[(n0 + v) * l.rank + j * 32 + r] += l.scale * c[r * 32 + v];
          }
        }
      }
      G::thread_end();
    });
  }

  static void pack_masked_columns(elem *dst, const T *x, int64_t k, int64_t k0, int64_t cols, int64_t tokens,
                                  const qt_dropout &dropout, int32_t index) {
    alignas(64) T rows[32 * 32];
    for (int64_t t = 0; t < tokens; t += 32) {
      const int64_t count = tokens - t < 32 ? tokens - t : 32;
      for (int64_t r = 0; r < count; ++r)
        mask_row(rows + r * 32, x + (t + r) * k + k0, dropout, dropout.keys[t + r], index, k0, cols);
      G::pack_b_nn(dst + t * 32, rows, 32, count, cols);
    }
  }
};

}  // namespace qt::QT_ISA
