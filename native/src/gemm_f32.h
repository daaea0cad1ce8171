// Blocks of 32 x 32 from packed fp32 panels: the product kernel of every ISA without bf16 products.
//
//   A block: panels of [k][MR]     MR rows side by side for each k, so that a row's element is one broadcast; where MR does
//                                  not divide 32, panels of four rows follow
//   B block: [k][32]
//
// Activations of either type are widened at packing. The compiler turns the fixed-size loops into registers; MR and NC
// (columns of a register block) are chosen so that MR * NC accumulators fit the ISA's register file.
#pragma once

#include "common.h"
#include "nf4.h"

namespace qt::QT_ISA {

template <int MR, int NC>
struct GemmF32 {
  using elem = float;
  // Rows in panels of MR; those that follow are in panels of four.
  static constexpr int64_t kWhole = 32 % MR ? 24 : 32;
  static_assert(kWhole % MR == 0, "");
  struct Panel {
    int64_t first, rows;
  };
  static Panel panel_of(int64_t r) { return r < kWhole ? Panel{r / MR * MR, MR} : Panel{r / 4 * 4, 4}; }
  // Row r of an A block of `k` steps: its element of step i is [i * panel_of(r).rows].
  static elem *row_a(elem *block, int64_t r, int64_t k) {
    const Panel panel = panel_of(r);
    return block + panel.first * k + r - panel.first;
  }
  static int64_t padded(int64_t k) { return k; }
  static void thread_begin() {}
  static void thread_end() {}

  template <class T>
  static void pack_a(elem *dst, const T *src, int64_t ld, int64_t rows, int64_t k) {
    for (int64_t r = 0; r < 32; ++r) {
      elem *row = row_a(dst, r, k);
      const int64_t step = panel_of(r).rows;
      for (int64_t i = 0; i < k; ++i) row[i * step] = r < rows ? to_float(src[r * ld + i]) : 0.0f;
    }
  }
  // Blocks whose reduction is longer (`total`) than the source's k end in zeros.
  template <class T>
  static void pack_a_t(elem *dst, const T *src, int64_t ld, int64_t k, int64_t rows, int64_t total = 0) {
    if (total < k) total = k;
    for (Panel panel{0, 0}; panel.first < 32; panel.first += panel.rows) {
      panel = panel_of(panel.first);
      for (int64_t i = 0; i < total; ++i)
        for (int64_t r = panel.first; r < panel.first + panel.rows; ++r)
          *dst++ = i < k && r < rows ? to_float(src[i * ld + r]) : 0.0f;
    }
  }
  template <class T>
  static void pack_b_nt(elem *dst, const T *src, int64_t ld, int64_t cols, int64_t k, float scale = 1.0f) {
    for (int64_t n = 0; n < 32; ++n)
      for (int64_t i = 0; i < k; ++i) dst[i * 32 + n] = n < cols ? scale * to_float(src[n * ld + i]) : 0.0f;
  }
  template <class T>
  static void pack_b_nn(elem *dst, const T *src, int64_t ld, int64_t k, int64_t cols, int64_t total = 0) {
    for (int64_t i = 0; i < (total < k ? k : total); ++i)
      for (int64_t n = 0; n < 32; n += kLanes)
        store16(dst + i * 32 + n, i < k && n < cols ? load_part(src + i * ld + n, cols - n) : splat(0.0f));
  }

  // Row r of an A block with k = 32, and rows r, r + 1 (r even) of a B block: for products that are made on the spot.
  static void put_row_a(elem *block, int64_t r, f32x16 low, f32x16 high) {
    alignas(64) float row[32];
    store16(row, low);
    store16(row + 16, high);
    for (int64_t i = 0; i < 32; ++i) at_a(block, r, i) = row[i];
  }
  static void get_row_a(const elem *block, int64_t r, f32x16 *low, f32x16 *high) {
    alignas(64) float row[32];
    for (int64_t i = 0; i < 32; ++i) row[i] = at_a(const_cast<elem *>(block), r, i);
    *low = load16(row);
    *high = load16(row + 16);
  }
  static elem &at_a(elem *block, int64_t r, int64_t i) { return row_a(block, r, 32)[i * panel_of(r).rows]; }
  static void put_pair_b(elem *block, int64_t r, f32x16 low0, f32x16 high0, f32x16 low1, f32x16 high1) {
    store16(block + r * 32, low0);
    store16(block + r * 32 + 16, high0);
    store16(block + r * 32 + 32, low1);
    store16(block + r * 32 + 48, high1);
  }

  // dst [32, 32] = src transposed.
  static void transpose(float *dst, const float *src) {
    for (int64_t r = 0; r < 32; ++r)
      for (int64_t i = 0; i < 32; ++i) dst[r * 32 + i] = src[i * 32 + r];
  }

  // A B block of an NF4 weight over part of the reduction: rows n0 .. n0 + cols as columns, k from `from` to `to` (nt); or
  // columns k0 .. k0 + cols, rows from `from` to `to` (nn). Values are rounded to T, as a dequantised weight of that type
  // would be.
  template <class T>
  static void pack_nf4_nt(elem *dst, const qt_weight &w, int64_t n0, int64_t cols, int64_t from, int64_t to) {
    for (int64_t n = 0; n < 32; ++n) {
      if (n < cols)
        nf4_row<T>(w, n0 + n, from, to, [&](int64_t i, float value) { dst[i * 32 + n] = value; });
      else
        for (int64_t i = 0; i < to - from; ++i) dst[i * 32 + n] = 0.0f;
    }
  }
  template <class T>
  static void pack_nf4_nn(elem *dst, const qt_weight &w, int64_t k0, int64_t cols, int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row, dst += 32) {
      nf4_row<T>(w, row, k0, k0 + cols, [&](int64_t i, float value) { dst[i] = value; });
      for (int64_t i = cols; i < 32; ++i) dst[i] = 0.0f;
    }
  }

  // Nothing but products, from registers: what the machine can do at most. Returns the floating-point operations done.
  static double peak(int64_t iterations) {
    constexpr int kVecs = NC / 16;
    f32x16 acc[MR][kVecs];
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kVecs; ++v) acc[r][v] = splat(static_cast<float>(r));
    const f32x16 b = splat(static_cast<float>(iterations & 1));
    for (int64_t i = 0; i < iterations; ++i)
      for (int r = 0; r < MR; ++r)
        for (int v = 0; v < kVecs; ++v) acc[r][v] += acc[r][v] * b;
    volatile float keep = 0.0f;  // the products must not be optimised away
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kVecs; ++v) keep = keep + sum_lanes(acc[r][v]);
    return 2.0 * MR * NC * static_cast<double>(iterations);
  }

  // Steps `from` .. `from + k` of an A block of `ld` steps (0: k), and a B block of k steps.
  struct Segment {
    const elem *a, *b;
    int64_t k, ld = 0, from = 0;
  };
  // c [32, 32] = sum over segments of A B (+= when `accumulate`). At least the first `rows` rows and `cols` columns.
  static void block(float *c, const Segment *segments, int count, bool accumulate = false, int64_t rows = 32,
                    int64_t cols = 32) {
    for (int64_t col = 0; col < cols; col += NC) {
      int64_t row = 0;
      for (; row < kWhole && row < rows; row += MR) strip<MR>(c + row * 32 + col, segments, count, accumulate, row, col);
      if constexpr (kWhole < 32)
        for (; row < rows; row += 4) strip<4>(c + row * 32 + col, segments, count, accumulate, row, col);
    }
  }

 private:
  // The panel that begins with `row`, NC columns from `col` on. Not inlined: among the caller's variables GCC found no room
  // for the accumulators (AVX2's forward was 25 % slower).
  template <int Rows>
  __attribute__((noinline)) static void strip(float *c, const Segment *segments, int count, bool accumulate, int64_t row,
                                              int64_t col) {
    constexpr int kVecs = NC / 16;
    f32x16 acc[Rows][kVecs];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVecs; ++v) acc[r][v] = accumulate ? load16(c + r * 32 + v * 16) : splat(0.0f);
    for (int s = 0; s < count; ++s) {
      const Segment &one = segments[s];
      const float *a = one.a + row * (one.ld ? one.ld : one.k) + one.from * Rows, *b = one.b + col;
      for (int64_t i = 0; i < one.k; ++i, a += Rows, b += 32)
        for (int v = 0; v < kVecs; ++v) {
          const f32x16 bv = load16(b + v * 16);
          for (int r = 0; r < Rows; ++r) acc[r][v] += a[r] * bv;
        }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVecs; ++v) store16(c + r * 32 + v * 16, acc[r][v]);
  }
};

// MR * NC / lanes accumulators leave room for the operands, and hide the latency of a sum.
#if defined(__AVX512F__)
using F32 = GemmF32<8, 32>;
#elif defined(__AVX2__)
using F32 = GemmF32<6, 16>;
#elif defined(__aarch64__)
using F32 = GemmF32<4, 16>;
#else
using F32 = GemmF32<2, 16>;
#endif

}  // namespace qt::QT_ISA
