// What every kernel file shares: bf16, 16-lane vectors, and the work description of a context.
//
// QT_ISA is a namespace of its own for each ISA the library is built for: no two versions of an inline function may meet
// in the linker, or a weak CPU could be given a strong one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef QT_ISA
#error "compile with -DQT_ISA=portable, avx2, avx512, avx512_bf16 or amx_bf16"
#endif

#include "pool.h"
#include "quatrain.h"
#include "vectors.h"

namespace qt::QT_ISA {

struct bf16 {
  uint16_t bits;
};

constexpr int64_t kLanes = 16;
constexpr int64_t kAlign = 64;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t bf16_bits(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((wide >> 16) | 0x40u);
  return static_cast<uint16_t>((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
}
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  return bf16{bf16_bits(x)};
}

inline f32x16 splat(float x) { return splat_to<f32x16>(x); }

// 16 contiguous elements as floats, and back.
inline f32x16 load16(const float *p) { return load<f32x16>(p); }
inline f32x16 load16(const bf16 *p) { return as<f32x16>(load_widened<u32x16>(&p->bits) << 16); }
inline void store16(float *p, f32x16 x) { store(p, x); }
inline void store16(bf16 *p, f32x16 x) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(as<__m512>(x));  // the same rounding; denormals become zero
  std::memcpy(p, &narrow, sizeof(narrow));
#else
  const u32x16 bits = as<u32x16>(x);
  const u32x16 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const auto is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  store_narrowed(&p->bits, select(is_nan, (bits >> 16) | 0x40u, rounded));
#endif
}

// The head of a row that is shorter than a vector: missing lanes are zero, and are not written.
template <class T>
inline f32x16 load_part(const T *p, int64_t n) {
  if (n >= kLanes) return load16(p);
  alignas(64) float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = to_float(p[i]);
  return load16(lanes);
}
template <class T>
inline void store_part(T *p, f32x16 x, int64_t n) {
  if (n >= kLanes) return store16(p, x);
  alignas(64) float lanes[kLanes];
  store16(lanes, x);
  for (int64_t i = 0; i < n; ++i) p[i] = from_float<T>(lanes[i]);
}

// Lanes summed pairwise, always in the same order: the upper half onto the lower one.
template <class V>
inline float sum_lanes(V x) {
  if constexpr (Traits<V>::is_pair) {
    return sum_lanes(x.low + x.high);
  } else {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(as<__m512>(x));
#else
    alignas(kRegister) float v[kLanesOf<V>];
    store(v, x);
    for (int64_t half = kLanesOf<V> / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
#endif
  }
}
inline float max_lanes(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(as<__m512>(x));
#else
  alignas(64) float v[kLanes];
  store16(v, x);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
#endif
}

// 0, 1, .. 15.
inline i32x16 lane_numbers() {
  alignas(64) static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<i32x16>(kNumbers);
}

// Sums of squares in fp64, sixteen at a time and always in the same order.
struct Squares {
  decltype(widen(f32x16{})) sum = {};
  void add(f32x16 x) {
    const auto wide = widen(x);
    sum += wide * wide;
  }
  double total() const {
    double v[kLanes];
    std::memcpy(v, &sum, sizeof(v));
    for (int64_t i = 0; i < kLanes / 2; ++i) v[i] += v[i + kLanes / 2];
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
};

// 1 / x to 1 ULP, for x that is neither denormal nor close to overflow.
inline f32x16 reciprocal16(f32x16 x) {
#if defined(__AVX512F__)
  const __m512 v = as<__m512>(x), guess = _mm512_rcp14_ps(v);  // one Newton step doubles its 14 bits
  return as<f32x16>(_mm512_fmadd_ps(guess, _mm512_fnmadd_ps(v, guess, _mm512_set1_ps(1.0f)), guess));
#else
  return 1.0f / x;
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }
inline f32x16 min(f32x16 a, f32x16 b) { return select(a < b, a, b); }

#if defined(__AVX512F__)
// e^x to 2 ULP: 2^n p(r), n = round(x / ln 2), r = x - n ln 2 in two parts, p of degree 6 (Cephes' expf coefficients).
// The scale instruction takes care of underflow and overflow.
QT_INLINE f32x16 exp16(f32x16 x) {
  const __m512 v = _mm512_min_ps(_mm512_set1_ps(104.0f), as<__m512>(x));  // NaN in, NaN out
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
  // x = -inf makes r NaN; e^-inf is 0.
  const __mmask16 finite = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-104.0f), _CMP_NLT_UQ);
  return as<f32x16>(_mm512_maskz_scalef_ps(finite, p, n));
}
#else
// e^x to 2 ULP: 2^n p(r), n = round(x / ln 2), r = x - n ln 2 in two parts, p of degree 6 (Cephes' expf coefficients).
// Below -87.3 the result is 0; above 88.7 it is infinity; NaN gives NaN.
QT_INLINE f32x16 exp16(f32x16 x) {
  const f32x16 clamped = min(max(x, splat(-88.0f)), splat(88.8f));
  const f32x16 scaled = clamped * 1.44269504088896341f;
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = scaled + magic;
  const f32x16 n = shifted - magic;
  f32x16 r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // n = 128 would overflow the exponent field: scale in two steps.
  const i32x16 half = (convert<i32x16>(n) >> 1);
  const i32x16 low = (half + 127) << 23, high = (convert<i32x16>(n) - half + 127) << 23;
  f32x16 out = p * as<f32x16>(low) * as<f32x16>(high);
  out = select(x < splat(-87.3f), splat(0.0f), out);
  return select(x == x, out, x);
}
#endif

// A bump allocator over the caller's scratch. Every piece is aligned; `ok` tells whether all of them fitted.
struct Scratch {
  uintptr_t base;  // 0 when only counting
  size_t size, used;
  Scratch(void *memory, size_t bytes) : base(reinterpret_cast<uintptr_t>(memory)), size(bytes), used(0) {}
  template <class T>
  T *take(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), kAlign));
    T *at = reinterpret_cast<T *>(base + used);
    used += bytes;
    return at;
  }
  bool ok() const { return used <= size; }
};

}  // namespace qt::QT_ISA
