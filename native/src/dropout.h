// Dropout masks from a counter, the same bits as the reference (see ops/dropout): a mask depends on the token's key, the
// adapter and the column, never on how the work is split.
#pragma once

#include "common.h"

namespace qt::QT_ISA {

// The 32-bit integer hash "lowbias32" (C. Wellons, public domain).
inline uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

inline uint32_t dropout_token(int64_t key, int32_t index) {
  return mix32(static_cast<uint32_t>(key) ^ mix32(static_cast<uint32_t>(index)));
}

// 0 with probability p, else 1 / (1 - p).
inline float dropout_factor(uint32_t token, int64_t column, double p) {
  const uint32_t bits = mix32(token ^ mix32(static_cast<uint32_t>(column)));
  return bits >= static_cast<uint32_t>(p * 4294967296.0) ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f;
}

template <class T>
inline void mask_row(T *out, const T *x, const qt_dropout &dropout, int64_t key, int32_t index, int64_t first, int64_t n) {
  const uint32_t token = dropout_token(key, index);
  for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(to_float(x[i]) * dropout_factor(token, first + i, dropout.p));
}

}  // namespace qt::QT_ISA
