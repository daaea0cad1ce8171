// Blocks of 32 x 32 from packed fp32 panels: the product kernel of every ISA without bf16 products.
//
//   A block: [32 / MR][k][MR]      MR rows side by side for each k, so that a row's element is one broadcast
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
  static constexpr int64_t kRows = MR;
  static int64_t padded(int64_t k) { return k; }
  static void thread_begin() {}
  static void thread_end() {}

  template <class T>
  static void pack_a(elem *dst, const T *src, int64_t ld, int64_t rows, int64_t k) {
    for (int64_t sub = 0; sub < 32; sub += MR, dst += MR * k)
      for (int64_t r = 0; r < MR; ++r)
        for (int64_t i = 0; i < k; ++i) dst[i * MR + r] = sub + r < rows ? to_float(src[(sub + r) * ld + i]) : 0.0f;
  }
  // Blocks whose reduction is longer (`total`) than the source's k end in zeros.
  template <class T>
  static void pack_a_t(elem *dst, const T *src, int64_t ld, int64_t k, int64_t rows, int64_t total = 0) {
    if (total < k) total = k;
    for (int64_t sub = 0; sub < 32; sub += MR, dst += MR * total)
      for (int64_t i = 0; i < total; ++i)
        for (int64_t r = 0; r < MR; ++r)
          dst[i * MR + r] = i < k && sub + r < rows ? to_float(src[i * ld + sub + r]) : 0.0f;
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
    float *to = block + r / MR * MR * 32 + r % MR;
    for (int64_t i = 0; i < 32; ++i) to[i * MR] = row[i];
  }
  static void get_row_a(const elem *block, int64_t r, f32x16 *low, f32x16 *high) {
    alignas(64) float row[32];
    const float *from = block + r / MR * MR * 32 + r % MR;
    for (int64_t i = 0; i < 32; ++i) row[i] = from[i * MR];
    *low = load16(row);
    *high = load16(row + 16);
  }
  static elem &at_a(elem *block, int64_t r, int64_t i) { return block[r / MR * MR * 32 + i * MR + r % MR]; }
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

  // Where k = `at` of an A block is; a segment that starts there has the whole block's k as its `ld`.
  static const elem *a_at(const elem *block, int64_t at) { return block + at * MR; }

  // c [32, 32] = sum over segments of A B (+= when `accumulate`). At least the first `rows` rows and `cols` columns.
  struct Segment {
    const elem *a, *b;
    int64_t k, ld = 0;  // ld 0: k
  };
  static void block(float *c, const Segment *segments, int count, bool accumulate = false, int64_t rows = 32,
                    int64_t cols = 32) {
    for (int64_t col = 0; col < cols; col += NC)
      for (int64_t sub = 0; sub * MR < rows; ++sub)
        strip(c + sub * MR * 32 + col, segments, count, accumulate, sub, col);
  }

 private:
  // Rows of panel `sub`, NC columns from `col` on. Not inlined: among the caller's variables GCC found no room for the
  // accumulators (AVX2's forward was 25 % slower).
  __attribute__((noinline)) static void strip(float *c, const Segment *segments, int count, bool accumulate, int64_t sub,
                                              int64_t col) {
    constexpr int kVecs = NC / 16;
    f32x16 acc[MR][kVecs];
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kVecs; ++v) acc[r][v] = accumulate ? load16(c + r * 32 + v * 16) : splat(0.0f);
    for (int s = 0; s < count; ++s) {
      const float *a = segments[s].a + sub * MR * (segments[s].ld ? segments[s].ld : segments[s].k);
      const float *b = segments[s].b + col;
      for (int64_t i = 0; i < segments[s].k; ++i, a += MR, b += 32)
        for (int v = 0; v < kVecs; ++v) {
          const f32x16 bv = load16(b + v * 16);
          for (int r = 0; r < MR; ++r) acc[r][v] += a[r] * bv;
        }
    }
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kVecs; ++v) store16(c + r * 32 + v * 16, acc[r][v]);
  }
};

}  // namespace qt::QT_ISA
