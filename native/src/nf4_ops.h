// NF4 over a whole tensor, bit for bit bitsandbytes' (see ops/nf4/reference.py for what that pins): quantise, nested
// statistics, dequantise, and how far the result is from its source.
#pragma once

#include <cmath>

#include "common.h"
#include "nf4.h"

namespace qt::QT_ISA {

constexpr float kTiny = 1e-38f;
// Half a million weights, 0.15 ms of work: waking a thread for less costs more than it saves.
constexpr int64_t kBlocksPerItem = 8192;

// body(block) for all blocks, on the pool.
template <class Body>
inline void for_blocks(Pool &pool, int64_t blocks, const Body &body) {
  pool.parallel_for(ceil_div(blocks, kBlocksPerItem), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kBlocksPerItem < blocks ? (item + 1) * kBlocksPerItem : blocks;
    for (int64_t b = item * kBlocksPerItem; b < end; ++b) body(b);
  });
}

// out [n, k] = the weight's values, each rounded once to T.
template <class T>
int nf4_dequantize(Pool &pool, T *out, const qt_weight &w) {
  const int64_t n = w.n * w.k;
  for_blocks(pool, ceil_div(n, kNf4Block), [&](int64_t b) {
    const float absmax = block_absmax(w, b);
    T values[16];
    for (int c = 0; c < 16; ++c) values[c] = from_float<T>(kNf4Code[c] * absmax);
    const int64_t stop = (b + 1) * kNf4Block < n ? (b + 1) * kNf4Block : n;
    for (int64_t i = b * kNf4Block; i < stop; ++i) {
      const uint8_t byte = w.codes[i >> 1];
      out[i] = values[(i & 1) ? byte & 15 : byte >> 4];
    }
  });
  return QT_OK;
}

// ---- codes -----------------------------------------------------------------------------------------------------------

// Midpoints of neighbouring codes.
alignas(64) inline constexpr float kMidpoints[16] = {
    (kNf4Code[0] + kNf4Code[1]) / 2,   (kNf4Code[1] + kNf4Code[2]) / 2,   (kNf4Code[2] + kNf4Code[3]) / 2,
    (kNf4Code[3] + kNf4Code[4]) / 2,   (kNf4Code[4] + kNf4Code[5]) / 2,   (kNf4Code[5] + kNf4Code[6]) / 2,
    (kNf4Code[6] + kNf4Code[7]) / 2,   (kNf4Code[7] + kNf4Code[8]) / 2,   (kNf4Code[8] + kNf4Code[9]) / 2,
    (kNf4Code[9] + kNf4Code[10]) / 2,  (kNf4Code[10] + kNf4Code[11]) / 2, (kNf4Code[11] + kNf4Code[12]) / 2,
    (kNf4Code[12] + kNf4Code[13]) / 2, (kNf4Code[13] + kNf4Code[14]) / 2, (kNf4Code[14] + kNf4Code[15]) / 2,
};

// [-1, 1] in equal bins, bin = round(14 x + 16), so narrow that none holds two midpoints: a value's code is the number of
// midpoints in the bins below its own, and one more where it is above the midpoint in its own.
struct Bins {
  float midpoint[32];  // 2 where the bin has none
  int32_t below[32];
  bool apart;  // no bin with two midpoints, and none so close to an edge that rounding decides on which side it is
};
constexpr float kBinsPerUnit = 14.0f, kMiddleBin = 16.0f;
constexpr Bins make_bins() {
  Bins bins{};
  bins.apart = true;
  int below = 0;
  for (int b = 0; b < 32; ++b) {
    bins.midpoint[b] = 2.0f;
    bins.below[b] = below;
    for (int c = 0; c < 15; ++c) {
      const float at = kMidpoints[c] * kBinsPerUnit + kMiddleBin - static_cast<float>(b);
      if (at < -0.5f || at >= 0.5f) continue;
      if (bins.midpoint[b] < 2.0f || at < -0.49f || at > 0.49f) bins.apart = false;
      bins.midpoint[b] = kMidpoints[c];
      ++below;
    }
  }
  return bins;
}
alignas(64) inline constexpr Bins kBins = make_bins();
static_assert(kBins.apart, "");

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

// 8 bytes of codes, the even element in the high nibble: those nearest to 16 values in [-1, 1] (a little beyond is
// allowed), the lower one on a tie.
inline void put_codes(uint8_t *out, const float *values) {
#if defined(__AVX512F__)
  const __m512 x = _mm512_loadu_ps(values);
  const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(kBinsPerUnit), _mm512_set1_ps(kMagic + kMiddleBin));
  const __m512i bin = _mm512_castps_si512(shifted);  // the look-ups take the low five bits
  const __m512 midpoint = _mm512_permutex2var_ps(_mm512_load_ps(kBins.midpoint), bin, _mm512_load_ps(kBins.midpoint + 16));
  const __m512i below = _mm512_permutex2var_epi32(_mm512_load_si512(kBins.below), bin, _mm512_load_si512(kBins.below + 16));
  const __mmask16 above = _mm512_cmp_ps_mask(x, midpoint, _CMP_GT_OQ);
  const __m512i index = _mm512_mask_add_epi32(below, above, below, _mm512_set1_epi32(1));
  const __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(index, 4), _mm512_srli_epi64(index, 32));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(out), _mm512_cvtepi64_epi8(pairs));
#else
  const auto code = [&](int i) {
    const uint32_t bin = as<uint32_t>(values[i] * kBinsPerUnit + (kMagic + kMiddleBin)) & 31;
    // The sign of the difference: a comparison would be a branch that cannot be foreseen.
    return static_cast<uint32_t>(kBins.below[bin]) + (as<uint32_t>(kBins.midpoint[bin] - values[i]) >> 31);
  };
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(code(2 * i) << 4 | code(2 * i + 1));
#endif
}

// 64 values, or fewer in a last block. False where one is not finite.
template <class T>
inline bool quantize_block(uint8_t *codes, float *absmax, const T *values, int64_t size) {
  const bool full = size == kNf4Block;
  alignas(64) float x[kNf4Block];
  if (full)
    for (int64_t i = 0; i < kNf4Block; i += kLanes) store16(x + i, load16(values + i));
  else
    for (int64_t i = 0; i < kNf4Block; ++i) x[i] = i < size ? to_float(values[i]) : 0.0f;
  // The magnitudes of floats order like their bits, with infinity and NaN above all numbers.
  uint32_t top = 0;
  for (int64_t i = 0; i < kNf4Block; ++i) {
    const uint32_t magnitude = as<uint32_t>(x[i]) & 0x7FFFFFFFu;
    top = magnitude > top ? magnitude : top;
  }
  const float most = as<float>(top);
  const float safe = most > kTiny ? most : kTiny;
  if (full) {
    *absmax = most;
    const float reciprocal = 1.0f / safe;
    for (int64_t i = 0; i < kNf4Block; ++i) x[i] *= reciprocal;
    for (int64_t i = 0; i < kNf4Block; i += kLanes) put_codes(codes + i / 2, x + i);
  } else {
    *absmax = safe;  // a partial last block stores what it divides by
    for (int64_t i = 0; i < kNf4Block; ++i) x[i] /= safe;
    uint8_t packed[kNf4Block / 2];
    for (int64_t i = 0; i < kNf4Block; i += kLanes) put_codes(packed + i / 2, x + i);
    // A missing last element was loaded as 0: its code is that of 0.
    std::memcpy(codes, packed, static_cast<size_t>((size + 1) / 2));
  }
  return top < 0x7F800000u;
}

// codes [ceil(n / 2)] and absmax [ceil(n / 64)] = from n values. `finite` is cleared where a block holds NaN or infinity.
template <class T>
int nf4_quantize(Pool &pool, uint8_t *codes, float *absmax, int32_t *finite, const T *values, int64_t n) {
  *finite = 1;
  for_blocks(pool, ceil_div(n, kNf4Block), [&](int64_t b) {
    const int64_t start = b * kNf4Block, size = n - start < kNf4Block ? n - start : kNf4Block;
    if (!quantize_block(codes + start / 2, absmax + b, values + start, size)) __atomic_store_n(finite, 0, __ATOMIC_RELAXED);
  });
  return QT_OK;
}

// ---- nested statistics -----------------------------------------------------------------------------------------------

// The 8-bit codes of `count` scales less the offset; returns the largest magnitude among those.
inline float nested_group(uint8_t *codes, const float *absmax, float offset, const uint8_t *nearest, int64_t count) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(absmax[i] - offset);
    most = size > most ? size : most;
  }
  const float reciprocal = 1.0f / most;
  for (int64_t i = 0; i < count; ++i) {
    float scaled = (absmax[i] - offset) * reciprocal;
    scaled = scaled < -1.0f ? -1.0f : scaled > 1.0f ? 1.0f : scaled;
    const float bin = rounded((scaled + 1.0f) * 0.5f * 65535.0f) + 0.5f;
    codes[i] = nearest[bin == bin ? static_cast<int32_t>(bin) : 0];  // 0 / 0 takes the first
  }
  return most;
}

// absmax_codes [blocks] and absmax2 [ceil(blocks / 256)] = absmax less its mean (`offset`) in 8 bits. nearest [65536]: the
// 8-bit code of each bin of [-1, 1].
inline int nf4_nested(Pool &pool, uint8_t *absmax_codes, float *absmax2, const float *absmax, float offset,
                      const uint8_t *nearest, int64_t blocks) {
  constexpr int64_t kGroupsPerItem = 64;
  const int64_t groups = ceil_div(blocks, kNestedBlock);
  pool.parallel_for(ceil_div(groups, kGroupsPerItem), [&](int64_t item, int32_t) {
    const int64_t end = (item + 1) * kGroupsPerItem < groups ? (item + 1) * kGroupsPerItem : groups;
    for (int64_t group = item * kGroupsPerItem; group < end; ++group) {
      const int64_t from = group * kNestedBlock, to = from + kNestedBlock < blocks ? from + kNestedBlock : blocks;
      absmax2[group] = nested_group(absmax_codes + from, absmax + from, offset, nearest, to - from);
    }
  });
  return QT_OK;
}

// ---- check -----------------------------------------------------------------------------------------------------------

// 16 elements from 8 bytes of codes; table: the block's 16 values.
inline f32x16 values16(const uint8_t *codes, f32x16 table) {
#if defined(__AVX512F__)
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes)));
  // The look-up takes the low four bits of each half: of the even element's the high nibble, of the odd one's the low.
  const __m512i index = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
  return as<f32x16>(_mm512_permutexvar_ps(index, as<__m512>(table)));
#else
  alignas(64) float values[16], out[16];
  store16(values, table);
  for (int i = 0; i < 8; ++i) out[2 * i] = values[codes[i] >> 4], out[2 * i + 1] = values[codes[i] & 15];
  return load16(out);
#endif
}

// *error and *norm = the sums of (w - values)^2 and values^2, added up in fixed parts.
template <class T>
int nf4_error(Pool &pool, double *error, double *norm, const qt_weight &w, const T *values) {
  constexpr int64_t kMostParts = 64;
  const int64_t n = w.n * w.k, blocks = ceil_div(n, kNf4Block), fit = ceil_div(blocks, kBlocksPerItem);
  const int64_t parts = fit < kMostParts ? fit : kMostParts, each = ceil_div(blocks, parts);
  double errors[kMostParts], norms[kMostParts];
  pool.parallel_for(parts, [&](int64_t part, int32_t) {
    Squares differences, sources;
    for (int64_t b = part * each; b < (part + 1) * each && b < blocks; ++b) {
      const f32x16 table = load16(kNf4Code) * block_absmax(w, b);
      const auto add = [&](const uint8_t *codes, f32x16 source) {
        differences.add(values16(codes, table) - source);
        sources.add(source);
      };
      const int64_t start = b * kNf4Block, size = n - start < kNf4Block ? n - start : kNf4Block;
      int64_t i = start;
      for (; i + kLanes <= start + size; i += kLanes) add(w.codes + i / 2, load16(values + i));
      if (i < start + size) {
        uint8_t codes[8] = {0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77};  // zeros
        std::memcpy(codes, w.codes + i / 2, static_cast<size_t>(ceil_div(start + size - i, 2)));
        add(codes, load_part(values + i, start + size - i));
      }
    }
    errors[part] = differences.total();
    norms[part] = sources.total();
  });
  *error = *norm = 0.0;
  for (int64_t part = 0; part < parts; ++part) *error += errors[part], *norm += norms[part];
  return QT_OK;
}

}  // namespace qt::QT_ISA
