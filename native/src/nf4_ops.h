// NF4 quantise and dequantise over a whole tensor, bit for bit bitsandbytes' (see ops/nf4/reference.py for what that pins).
#pragma once

#include <cmath>

#include "common.h"
#include "elementwise.h"
#include "nf4.h"

namespace qt::QT_ISA {

constexpr float kTiny = 1e-38f;

// out [n, k] = the weight's values, each rounded once to T.
template <class T>
int nf4_dequantize(Pool &pool, T *out, const qt_weight &w) {
  constexpr int64_t kPiece = 256;  // blocks of 64
  const int64_t n = w.n * w.k, blocks = ceil_div(n, kNf4Block);
  pool.parallel_for(ceil_div(blocks, kPiece), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kPiece < blocks ? (item + 1) * kPiece : blocks;
    for (int64_t b = item * kPiece; b < end; ++b) {
      const float absmax = block_absmax(w, b);
      T values[16];
      for (int c = 0; c < 16; ++c) values[c] = from_float<T>(kNf4Code[c] * absmax);
      const int64_t stop = (b + 1) * kNf4Block < n ? (b + 1) * kNf4Block : n;
      for (int64_t i = b * kNf4Block; i < stop; ++i) {
        const uint8_t byte = w.codes[i >> 1];
        out[i] = values[(i & 1) ? byte & 15 : byte >> 4];
      }
    }
  });
  return QT_OK;
}

// Midpoints of neighbouring codes.
alignas(64) inline constexpr float kMidpoints[16] = {
    (kNf4Code[0] + kNf4Code[1]) / 2,   (kNf4Code[1] + kNf4Code[2]) / 2,   (kNf4Code[2] + kNf4Code[3]) / 2,
    (kNf4Code[3] + kNf4Code[4]) / 2,   (kNf4Code[4] + kNf4Code[5]) / 2,   (kNf4Code[5] + kNf4Code[6]) / 2,
    (kNf4Code[6] + kNf4Code[7]) / 2,   (kNf4Code[7] + kNf4Code[8]) / 2,   (kNf4Code[8] + kNf4Code[9]) / 2,
    (kNf4Code[9] + kNf4Code[10]) / 2,  (kNf4Code[10] + kNf4Code[11]) / 2, (kNf4Code[11] + kNf4Code[12]) / 2,
    (kNf4Code[12] + kNf4Code[13]) / 2, (kNf4Code[13] + kNf4Code[14]) / 2, (kNf4Code[14] + kNf4Code[15]) / 2,
};

// The index of the nearest code, the lower one on a tie: how many midpoints lie below the value.
inline i32x16 nearest_code(f32x16 x) {
#if defined(__AVX512F__)
  // Binary search: index += s where x is above the midpoint s - 1 further.
  const __m512 midpoints = _mm512_load_ps(kMidpoints);
  __m512i index = _mm512_setzero_si512();
  for (int s = 8; s > 0; s /= 2) {
    const __m512 midpoint = _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(s - 1)), midpoints);
    const __mmask16 above = _mm512_cmp_ps_mask(as<__m512>(x), midpoint, _CMP_GT_OQ);
    index = _mm512_mask_add_epi32(index, above, index, _mm512_set1_epi32(s));
  }
  return as<i32x16>(index);
#else
  i32x16 index = {};
  for (int c = 0; c < 15; ++c) index -= x > splat(kMidpoints[c]);
  return index;
#endif
}

inline f32x16 abs16(f32x16 x) { return as<f32x16>(as<u32x16>(x) & 0x7FFFFFFFu); }

// Two indices to a byte, the even one high.
inline void pack_codes(uint8_t *out, i32x16 index) {
  using u64x8 = uint64_t __attribute__((vector_size(64)));
  using u8x8 = uint8_t __attribute__((vector_size(8)));
  const u64x8 pairs = as<u64x8>(index);  // little endian: the even index is the low half
  const u8x8 bytes = __builtin_convertvector(pairs << 4 | pairs >> 32, u8x8);
  std::memcpy(out, &bytes, sizeof(bytes));
}

// codes [ceil(n / 2)] and absmax [ceil(n / 64)] = from n values. `finite` is cleared where a block holds NaN or infinity.
template <class T>
int nf4_quantize(Pool &pool, uint8_t *codes, float *absmax, int32_t *finite, const T *values, int64_t n) {
  constexpr int64_t kPiece = 256;
  const int64_t blocks = ceil_div(n, kNf4Block);
  *finite = 1;
  pool.parallel_for(ceil_div(blocks, kPiece), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kPiece < blocks ? (item + 1) * kPiece : blocks;
    for (int64_t b = item * kPiece; b < end; ++b) {
      const int64_t start = b * kNf4Block, size = n - start < kNf4Block ? n - start : kNf4Block;
      const bool full = size == kNf4Block;
      f32x16 x[4], top = splat(0.0f), bad = splat(0.0f);
      for (int v = 0; v < 4; ++v) {
        x[v] = size > v * kLanes ? load_part(values + start + v * kLanes, size - v * kLanes) : splat(0.0f);
        top = max(top, abs16(x[v]));
        bad += x[v] * 0.0f;  // 0 for finite values, NaN for the others
      }
      float most = max_lanes(top);
      const float check = sum_lanes(bad);
      if (check != check) __atomic_store_n(finite, 0, __ATOMIC_RELAXED);
      const float safe = most > kTiny ? most : kTiny;
      if (!full) most = safe;  // a partial last block stores what it divides by
      absmax[b] = most;
      const float reciprocal = 1.0f / safe;
      uint8_t packed[kNf4Block / 2];
      for (int v = 0; v < 4; ++v) {
        const f32x16 scaled = full ? x[v] * reciprocal : x[v] / safe;
        pack_codes(packed + v * 8, nearest_code(min(max(scaled, splat(-1.0f)), splat(1.0f))));
      }
      // A missing last element was loaded as 0: its code is that of 0.
      std::memcpy(codes + start / 2, packed, static_cast<size_t>((size + 1) / 2));
    }
  });
  return QT_OK;
}

}  // namespace qt::QT_ISA
