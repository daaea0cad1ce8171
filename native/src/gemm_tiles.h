// Blocks of 32 x 32 from packed bf16 tiles, for AMX-BF16 and AVX512-BF16. A tile is 16 rows of 64 bytes.
//
//   A block: [k / 32][2][16 rows][32 k]            rows as they are
//   B block: [k / 32][2][16 k-pairs][16 n][2]      pairs of k interleaved ("VNNI"), as both instructions want them
//
// k is padded with zeros to a multiple of 32; a product may stop at the k that is there. One step over k needs one tile load for each tile product, the least that
// eight tile registers allow, and dense tiles load faster than strided ones.
#pragma once

#include <immintrin.h>

#include "common.h"
#include "nf4.h"
#if defined(QT_EMULATED_AMX)
#include "emulated_tiles.h"
#endif

namespace qt::QT_ISA {

// 32 contiguous elements as bf16, the missing ones zero.
inline __m512i load32(const bf16 *p, int64_t n) {
  if (n >= 32) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(n <= 0 ? 0u : (1u << n) - 1u, p);
}
inline __m512i load32(const float *p, int64_t n) {
  const auto mask = [](int64_t left) { return static_cast<__mmask16>(left >= 16 ? 0xFFFF : left <= 0 ? 0 : (1 << left) - 1); };
  const __m512 low = _mm512_maskz_loadu_ps(mask(n), p), high = _mm512_maskz_loadu_ps(mask(n - 16), p + 16);
  return as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// 16 x 16 dwords transposed in registers.
inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Words of two rows interleaved: lanes 0 .. 15 (pairs (a_i, b_i)) and 16 .. 31.
inline void interleave(__m512i a, __m512i b, __m512i *low, __m512i *high) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  *low = _mm512_permutex2var_epi16(a, first, b);
  *high = _mm512_permutex2var_epi16(a, second, b);
}

// 32 NF4 weights (16 bytes, high nibble first) by a table of 16 scaled bf16 values held twice in `table`.
inline __m512i nf4_lookup(const uint8_t *codes, __m512i table) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes)));
  const __m512i odd = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(15)), 16);
  const __m512i index = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), odd);
  return _mm512_permutexvar_epi16(index, table);
}
inline __m512i nf4_table(float absmax) {
  const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(kNf4Code), _mm512_set1_ps(absmax));
  return _mm512_broadcast_i64x4(as<__m256i>(_mm512_cvtneps_pbh(scaled)));
}

struct TilePacking {
  using elem = bf16;
  static int64_t padded(int64_t k) { return round_up(k, 32); }
  // Steps `from` (a multiple of 32) .. `from + k` of an A block, whatever it holds in all, and a B block of k steps.
  struct Segment {
    const elem *a, *b;
    int64_t k, ld = 0, from = 0;  // ld: of layouts where it matters
  };

  template <class T>
  static void pack_a(elem *dst, const T *src, int64_t ld, int64_t rows, int64_t k) {
    for (int64_t step = 0; step < k; step += 32)
      for (int64_t r = 0; r < 32; ++r, dst += 32)
        _mm512_store_si512(dst, r < rows ? load32(src + r * ld + step, k - step) : _mm512_setzero_si512());
  }
  // Blocks whose reduction is longer (`total`) than the source's k end in zeros.
  template <class T>
  static void pack_a_t(elem *dst, const T *src, int64_t ld, int64_t k, int64_t rows, int64_t total = 0) {
    __m512i pairs[2][16];
    for (int64_t step = 0; step < (total < k ? k : total); step += 32, dst += 1024) {
      load_pairs(pairs, src, ld, step, k, rows);
      for (int tile = 0; tile < 2; ++tile) {
        transpose16(pairs[tile]);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + tile * 512 + i * 32, pairs[tile][i]);
      }
    }
  }
  template <class T>
  static void pack_b_nt(elem *dst, const T *src, int64_t ld, int64_t cols, int64_t k, float scale = 1.0f) {
    __m512i rows[16];
    for (int64_t step = 0; step < k; step += 32)
      for (int64_t tile = 0; tile < 32; tile += 16, dst += 512) {
        for (int64_t i = 0; i < 16; ++i) {
          rows[i] = tile + i < cols ? load32(src + (tile + i) * ld + step, k - step) : _mm512_setzero_si512();
          if (scale != 1.0f) rows[i] = scaled(rows[i], scale);
        }
        transpose16(rows);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * 32, rows[i]);
      }
  }
  template <class T>
  static void pack_b_nn(elem *dst, const T *src, int64_t ld, int64_t k, int64_t cols, int64_t total = 0) {
    __m512i pairs[2][16];
    for (int64_t step = 0; step < (total < k ? k : total); step += 32, dst += 1024) {
      load_pairs(pairs, src, ld, step, k, cols);
      for (int tile = 0; tile < 2; ++tile)
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + tile * 512 + i * 32, pairs[tile][i]);
    }
  }

  // dst [32, 32] = src transposed.
  static void transpose(float *dst, const float *src) {
    __m512i rows[16];
    for (int64_t down = 0; down < 32; down += 16)
      for (int64_t right = 0; right < 32; right += 16) {
        for (int64_t i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(src + (down + i) * 32 + right);
        transpose16(rows);
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(dst + (right + i) * 32 + down, rows[i]);
      }
  }

  // Row r of an A block with k = 32, and rows r, r + 1 (r even) of a B block: for products that are made on the spot.
  static __m512i narrow(f32x16 low, f32x16 high) { return as<__m512i>(_mm512_cvtne2ps_pbh(as<__m512>(high), as<__m512>(low))); }
  static void put_row_a(elem *block, int64_t r, f32x16 low, f32x16 high) {
    _mm512_store_si512(block + r * 32, narrow(low, high));
  }
  static void get_row_a(const elem *block, int64_t r, f32x16 *low, f32x16 *high) {
    *low = load16(block + r * 32);
    *high = load16(block + r * 32 + 16);
  }
  static elem &at_a(elem *block, int64_t r, int64_t i) { return block[r * 32 + i]; }
  static void put_pair_b(elem *block, int64_t r, f32x16 low0, f32x16 high0, f32x16 low1, f32x16 high1) {
    __m512i first, second;
    interleave(narrow(low0, high0), narrow(low1, high1), &first, &second);
    _mm512_store_si512(block + r * 16, first);
    _mm512_store_si512(block + 512 + r * 16, second);
  }

  // A B block of an NF4 weight over part of the reduction: rows n0 .. n0 + cols as columns, k from `from` (a multiple of 64)
  // to `to` (one as well, or w.k).
  template <class T>
  static void pack_nf4_nt(elem *dst, const qt_weight &w, int64_t n0, int64_t cols, int64_t from, int64_t to) {
    if (w.k % kNf4Block) return pack_nf4_rows(dst, w, n0, cols, from, to);
    __m512i rows[16];
    for (int64_t step = from; step < to; step += 64)
      for (int64_t tile = 0; tile < 32; tile += 16) {
        __m512i tables[16];
        for (int64_t i = 0; i < 16; ++i)
          if (tile + i < cols) tables[i] = nf4_table(block_absmax(w, ((n0 + tile + i) * w.k + step) / kNf4Block));
        for (int64_t half = 0; half < 64; half += 32) {
          for (int64_t i = 0; i < 16; ++i)
            rows[i] = tile + i < cols ? nf4_lookup(w.codes + ((n0 + tile + i) * w.k + step + half) / 2, tables[i])
                                      : _mm512_setzero_si512();
          transpose16(rows);
          elem *at = dst + (step - from + half) * 32 + tile * 32;
          for (int i = 0; i < 16; ++i) _mm512_store_si512(at + i * 32, rows[i]);
        }
      }
  }
  // Columns k0 .. k0 + cols (k0 a multiple of 32) of rows `from` (a multiple of 32) to `to`: the reduction of the backward
  // runs over the rows.
  template <class T>
  static void pack_nf4_nn(elem *dst, const qt_weight &w, int64_t k0, int64_t cols, int64_t from, int64_t to) {
    if (w.k % kNf4Block) return pack_nf4_columns(dst, w, k0, cols, from, to);
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t row = from; row < from + padded(to - from); row += 2, dst += 32) {
      __m512i even = zero, odd = zero, low, high;
      if (row < to) even = nf4_lookup(w.codes + (row * w.k + k0) / 2, nf4_table(block_absmax(w, (row * w.k + k0) / 64)));
      if (row + 1 < to)
        odd = nf4_lookup(w.codes + ((row + 1) * w.k + k0) / 2, nf4_table(block_absmax(w, ((row + 1) * w.k + k0) / 64)));
      interleave(even, odd, &low, &high);
      if (row > from && row % 32 == 0) dst += 512;
      _mm512_store_si512(dst, low);
      _mm512_store_si512(dst + 512, high);
    }
  }

 private:
  static __m512i scaled(__m512i x, float scale) {
    const __m512 low = as<__m512>(_mm512_slli_epi32(x, 16));
    const __m512 high = as<__m512>(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    const __m256i even = as<__m256i>(_mm512_cvtneps_pbh(_mm512_mul_ps(low, _mm512_set1_ps(scale))));
    const __m256i odd = as<__m256i>(_mm512_cvtneps_pbh(_mm512_mul_ps(high, _mm512_set1_ps(scale))));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
  }
  // 32 rows of k from `step` on as 16 pairs, 32 columns in two tiles.
  template <class T>
  static void load_pairs(__m512i pairs[2][16], const T *src, int64_t ld, int64_t step, int64_t k, int64_t cols) {
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = step + 2 * i;
      const __m512i even = row < k ? load32(src + row * ld, cols) : zero;
      const __m512i odd = row + 1 < k ? load32(src + (row + 1) * ld, cols) : zero;
      interleave(even, odd, &pairs[0][i], &pairs[1][i]);
    }
  }
  // Where blocks of 64 straddle rows (k not a multiple of 64): one element at a time.
  static elem &b_at(elem *dst, int64_t k, int64_t n) {
    return dst[(k / 32) * 1024 + (n / 16) * 512 + (k % 32) / 2 * 32 + (n % 16) * 2 + k % 2];
  }
  static void pack_nf4_rows(elem *dst, const qt_weight &w, int64_t n0, int64_t cols, int64_t from, int64_t to) {
    std::memset(dst, 0, static_cast<size_t>(padded(to - from)) * 32 * sizeof(elem));
    for (int64_t n = 0; n < cols; ++n)
      nf4_row<bf16>(w, n0 + n, from, to, [&](int64_t i, float value) { b_at(dst, i, n) = from_float<bf16>(value); });
  }
  static void pack_nf4_columns(elem *dst, const qt_weight &w, int64_t k0, int64_t cols, int64_t from, int64_t to) {
    std::memset(dst, 0, static_cast<size_t>(padded(to - from)) * 32 * sizeof(elem));
    for (int64_t row = from; row < to; ++row)
      nf4_row<bf16>(w, row, k0, k0 + cols,
                    [&](int64_t i, float value) { b_at(dst, row - from, i) = from_float<bf16>(value); });
  }
};

struct GemmDot : TilePacking {
  static void thread_begin() {}
  static void thread_end() {}
  // Nothing but products, from registers: what the machine can do at most. Returns the floating-point operations done.
  static double peak(int64_t iterations) {
    __m512 acc[16];
    for (__m512 &a : acc) a = _mm512_setzero_ps();
    const auto ones = as<__m512bh>(_mm512_set1_epi32(static_cast<int>(iterations)));
    for (int64_t i = 0; i < iterations; ++i)
      for (__m512 &a : acc) a = _mm512_dpbf16_ps(a, ones, ones);
    volatile float keep = 0.0f;  // the products must not be optimised away
    for (__m512 &a : acc) keep = keep + sum_lanes(as<f32x16>(a));
    return 2.0 * 16 * 32 * static_cast<double>(iterations);
  }
  // c [32, 32] = sum over segments of A B (+= when `accumulate`), by vdpbf16ps: pairs of k at once. At least the first
  // `rows` rows and `cols` columns.
  static void block(float *c, const Segment *segments, int count, bool accumulate = false, int64_t rows = 32,
                    int64_t cols = 32) {
    for (int64_t row = 0; row < rows; row += 8)
      cols > 16 ? strip<2>(c, segments, count, accumulate, row) : strip<1>(c, segments, count, accumulate, row);
  }

 private:
  // Eight rows from `row` on, and 16 * V columns.
  template <int V>
  static void strip(float *c, const Segment *segments, int count, bool accumulate, int64_t row) {
    __m512 acc[8][V];
    for (int r = 0; r < 8; ++r)
      for (int v = 0; v < V; ++v)
        acc[r][v] = accumulate ? _mm512_loadu_ps(c + (row + r) * 32 + v * 16) : _mm512_setzero_ps();
    for (int s = 0; s < count; ++s) {
      const elem *a = segments[s].a + (segments[s].from + row) * 32, *b = segments[s].b;
      int64_t k = segments[s].k;
      for (; k >= 32; k -= 32, a += 1024, b += 1024)
        for (int64_t p = 0; p < 16; ++p) pair<V>(acc, a, b, p);
      for (int64_t p = 0; 2 * p < k; ++p) pair<V>(acc, a, b, p);
    }
    for (int r = 0; r < 8; ++r)
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + (row + r) * 32 + v * 16, acc[r][v]);
  }
  template <int V>
  static void pair(__m512 (&acc)[8][V], const elem *a, const elem *b, int64_t p) {
    __m512bh right[V];
    for (int v = 0; v < V; ++v) right[v] = as<__m512bh>(_mm512_load_si512(b + v * 512 + p * 32));
    for (int r = 0; r < 8; ++r) {
      int32_t left;
      std::memcpy(&left, a + r * 32 + p * 2, 4);
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], as<__m512bh>(_mm512_set1_epi32(left)), right[v]);
    }
  }
};

#if defined(__AMX_BF16__) || defined(QT_EMULATED_AMX)
struct GemmAmx : TilePacking {
  // Eight tiles of 16 rows of 64 bytes.
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static void thread_begin() {
    // Constant data: GCC's intrinsic tells the compiler of the first 8 bytes only, and stores to the rest could be dropped.
    static constexpr Config config;
    _tile_loadconfig(&config);
  }
  static void thread_end() { _tile_release(); }
  // Nothing but products, from registers: what the machine can do at most. Returns the floating-point operations done.
  static double peak(int64_t iterations) {
    _tile_zero(6);
    _tile_zero(7);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < iterations; ++i) {
      _tile_dpbf16ps(0, 6, 7);
      _tile_dpbf16ps(1, 6, 7);
      _tile_dpbf16ps(2, 6, 7);
      _tile_dpbf16ps(3, 6, 7);
    }
    return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(iterations);
  }
  // c [32, 32] = sum over segments of A B (+= when `accumulate`): 2 x 2 tiles of C in registers. At least the first
  // `rows` rows and `cols` columns: with 16 of either, half of the tiles stay out.
  static void block(float *c, const Segment *segments, int count, bool accumulate = false, int64_t rows = 32,
                    int64_t cols = 32) {
    if (rows > 16)
      cols > 16 ? tiles<true, true>(c, segments, count, accumulate) : tiles<true, false>(c, segments, count, accumulate);
    else
      cols > 16 ? tiles<false, true>(c, segments, count, accumulate) : tiles<false, false>(c, segments, count, accumulate);
  }

 private:
  template <bool Low, bool Right>
  static void tiles(float *c, const Segment *segments, int count, bool accumulate) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory: all stores come first
    if (accumulate) {
      _tile_loadd(0, c, 128);
      if constexpr (Right) _tile_loadd(1, c + 16, 128);
      if constexpr (Low) _tile_loadd(2, c + 512, 128);
      if constexpr (Low && Right) _tile_loadd(3, c + 528, 128);
    } else {
      _tile_zero(0);
      if constexpr (Right) _tile_zero(1);
      if constexpr (Low) _tile_zero(2);
      if constexpr (Low && Right) _tile_zero(3);
    }
    for (int s = 0; s < count; ++s) {
      const elem *a = segments[s].a + segments[s].from * 32, *b = segments[s].b;
      for (int64_t step = 0; step < segments[s].k; step += 32, a += 1024, b += 1024) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        if constexpr (Right) _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Low) _tile_loadd(5, a + 512, 64);
        if constexpr (Right) _tile_dpbf16ps(1, 4, 7);
        if constexpr (Low) _tile_dpbf16ps(2, 5, 6);
        if constexpr (Low && Right) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, 128);
    if constexpr (Right) _tile_stored(1, c + 16, 128);
    if constexpr (Low) _tile_stored(2, c + 512, 128);
    if constexpr (Low && Right) _tile_stored(3, c + 528, 128);
  }
};
#endif

}  // namespace qt::QT_ISA
