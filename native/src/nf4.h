// NF4 values, bit for bit bitsandbytes': code times absmax in fp32, rounded once to the wanted type.
#pragma once

#include "common.h"

namespace qt::QT_ISA {

constexpr int64_t kNf4Block = 64;
constexpr int64_t kNestedBlock = 256;

alignas(64) inline constexpr float kNf4Code[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// Keeps the compiler from fusing a product with the sum that follows: nested statistics round twice.
inline float rounded(float x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

inline float block_absmax(const qt_weight &w, int64_t block) {
  if (w.absmax) return w.absmax[block];
  return rounded(w.code2[w.absmax_codes[block]] * w.absmax2[block / kNestedBlock]) + w.offset;
}

// put(i - from, value) for the elements from <= i < to of row `row`, each rounded to T.
template <class T, class Put>
inline void nf4_row(const qt_weight &w, int64_t row, int64_t from, int64_t to, const Put &put) {
  for (int64_t i = from; i < to;) {
    const int64_t flat = row * w.k + i;
    const int64_t block = flat / kNf4Block;
    const int64_t end = i + ((block + 1) * kNf4Block - flat) < to ? i + ((block + 1) * kNf4Block - flat) : to;
    const float absmax = block_absmax(w, block);
    float values[16];
    for (int c = 0; c < 16; ++c) values[c] = to_float(from_float<T>(kNf4Code[c] * absmax));
    for (int64_t at = flat; i < end; ++i, ++at) {
      const uint8_t byte = w.codes[at >> 1];
      put(i - from, values[(at & 1) ? byte & 15 : byte >> 4]);
    }
  }
}

}  // namespace qt::QT_ISA
