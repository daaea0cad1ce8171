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

// The index of the nearest code, the lower one on a tie: how many midpoints lie below the value.
inline i32x16 nearest_code(f32x16 x) {
  i32x16 index = {};
  for (int c = 0; c < 15; ++c) index -= x > splat((kNf4Code[c] + kNf4Code[c + 1]) / 2);
  return index;
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
        top = max(top, max(x[v], -x[v]));
        bad += x[v] * 0.0f;  // 0 for finite values, NaN for the others
      }
      float most = max_lanes(top);
      const float check = sum_lanes(bad);
      if (check != check) __atomic_store_n(finite, 0, __ATOMIC_RELAXED);
      const float safe = most > kTiny ? most : kTiny;
      if (!full) most = safe;  // a partial last block stores what it divides by
      absmax[b] = most;
      const float reciprocal = 1.0f / safe;
      alignas(64) int32_t index[kNf4Block];
      for (int v = 0; v < 4; ++v) {
        const f32x16 scaled = full ? x[v] * reciprocal : x[v] / safe;
        const i32x16 code = nearest_code(min(max(scaled, splat(-1.0f)), splat(1.0f)));
        std::memcpy(index + v * kLanes, &code, sizeof(code));
      }
      uint8_t *out = codes + start / 2;
      for (int64_t i = 0; i < size; i += 2) {
        const int32_t odd = i + 1 < size ? index[i + 1] : 7;  // the missing last element is the code of 0
        out[i / 2] = static_cast<uint8_t>(index[i] << 4 | odd);
      }
    }
  });
  return QT_OK;
}

}  // namespace qt::QT_ISA
