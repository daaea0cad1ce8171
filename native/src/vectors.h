// Vectors of 16 lanes on every architecture: the lane structure, hence every reduction order, is the same everywhere.
//
// They are made of GCC/Clang vector extensions of one register each. A vector that is wider than a register is a `Pair` of
// halves: GCC would keep a single wide type in memory and go there for each operation (AVX2 then multiplies at a tenth
// of its speed, measured).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// For functions that the compiler finds too large to inline: passing a pair to a call goes through memory.
#define QT_INLINE __attribute__((always_inline)) inline

namespace qt::QT_ISA {

#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// One register.
using f32r = float __attribute__((vector_size(kRegister)));
using f64r = double __attribute__((vector_size(kRegister)));
using i32r = int32_t __attribute__((vector_size(kRegister)));
using u32r = uint32_t __attribute__((vector_size(kRegister)));

template <class V>
struct Pair {
  V low, high;
};

#if defined(__AVX512F__)
template <class V>
using Lanes16 = V;
#elif defined(__AVX2__)
template <class V>
using Lanes16 = Pair<V>;
#else
template <class V>
using Lanes16 = Pair<Pair<V>>;
#endif
using f32x16 = Lanes16<f32r>;
using i32x16 = Lanes16<i32r>;
using u32x16 = Lanes16<u32r>;

template <class V>
struct Traits {
  static constexpr bool is_pair = false;
  using Element = std::remove_reference_t<decltype(std::declval<V &>()[0])>;
};
template <class V>
struct Traits<Pair<V>> {
  static constexpr bool is_pair = true;
  using Element = typename Traits<V>::Element;
};
template <class V>
using Element = typename Traits<V>::Element;
template <class V>
constexpr int64_t kLanesOf = static_cast<int64_t>(sizeof(V) / sizeof(Element<V>));

// ---- operators of pairs: those of their halves; a number stands for a vector of it -----------------------------------

#define QT_BINARY(op)                                                                   \
  template <class V>                                                                    \
  inline auto operator op(Pair<V> a, Pair<V> b) {                                       \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};            \
  }                                                                                     \
  template <class V, class S, std::enable_if_t<std::is_arithmetic<S>::value, int> = 0>  \
  inline auto operator op(Pair<V> a, S s) {                                             \
    const auto b = static_cast<Element<V>>(s);                                          \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                         \
  }                                                                                     \
  template <class V, class S, std::enable_if_t<std::is_arithmetic<S>::value, int> = 0>  \
  inline auto operator op(S s, Pair<V> b) {                                             \
    const auto a = static_cast<Element<V>>(s);                                          \
    return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                         \
  }
QT_BINARY(+)
QT_BINARY(-)
QT_BINARY(*)
QT_BINARY(/)
QT_BINARY(&)
QT_BINARY(|)
QT_BINARY(<<)
QT_BINARY(>>)
QT_BINARY(<)
QT_BINARY(>)
QT_BINARY(>=)
QT_BINARY(==)
#undef QT_BINARY

template <class V>
inline Pair<V> operator-(Pair<V> a) {
  return {-a.low, -a.high};
}
template <class V>
inline Pair<V> operator~(Pair<V> a) {
  return {~a.low, ~a.high};
}
template <class V, class B>
inline Pair<V> &operator+=(Pair<V> &a, B b) {
  return a = a + b;
}
template <class V, class B>
inline Pair<V> &operator|=(Pair<V> &a, B b) {
  return a = a | b;
}

// ---- what registers need functions for -------------------------------------------------------------------------------

// The same bits as another type.
template <class To, class From>
inline To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To out;
  std::memcpy(&out, &x, sizeof(out));
  return out;
}
template <class To, class V>
inline To as(Pair<V> x) {
  using Half = decltype(To::low);
  return {as<Half>(x.low), as<Half>(x.high)};
}

// Each lane's value in another type of the same width.
template <class To, class From>
inline To convert(From x) {
  if constexpr (Traits<To>::is_pair) {
    using Half = decltype(To::low);
    return {convert<Half>(x.low), convert<Half>(x.high)};
  } else {
    return __builtin_convertvector(x, To);
  }
}

template <class V>
inline V load(const Element<V> *p) {
  if constexpr (Traits<V>::is_pair) {
    using Half = decltype(V::low);
    return {load<Half>(p), load<Half>(p + kLanesOf<Half>)};
  } else {
    V out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  }
}
template <class V>
inline void store(Element<V> *p, V x) {
  if constexpr (Traits<V>::is_pair) {
    using Half = decltype(V::low);
    store<Half>(p, x.low);
    store<Half>(p + kLanesOf<Half>, x.high);
  } else {
    std::memcpy(p, &x, sizeof(x));
  }
}

// Lanes of V from as many narrower integers, and back without the high bits.
template <class V, class Narrow>
inline V load_widened(const Narrow *p) {
  if constexpr (Traits<V>::is_pair) {
    using Half = decltype(V::low);
    return {load_widened<Half>(p), load_widened<Half>(p + kLanesOf<Half>)};
  } else {
    typedef Narrow Packed __attribute__((vector_size(kLanesOf<V> * sizeof(Narrow))));
    Packed narrow;
    std::memcpy(&narrow, p, sizeof(narrow));
    return __builtin_convertvector(narrow, V);
  }
}
template <class Narrow, class V>
inline void store_narrowed(Narrow *p, V x) {
  if constexpr (Traits<V>::is_pair) {
    store_narrowed(p, x.low);
    store_narrowed(p + kLanesOf<decltype(x.low)>, x.high);
  } else {
    typedef Narrow Packed __attribute__((vector_size(kLanesOf<V> * sizeof(Narrow))));
    const Packed narrow = __builtin_convertvector(x, Packed);
    std::memcpy(p, &narrow, sizeof(narrow));
  }
}

template <class V>
inline V splat_to(Element<V> x) {
  if constexpr (Traits<V>::is_pair) {
    using Half = decltype(V::low);
    return {splat_to<Half>(x), splat_to<Half>(x)};
  } else {
    return x - V{};  // not x + 0, which would make -0 of a -0
  }
}

template <class M, class V>
inline V select(M mask, V yes, V no) {
  if constexpr (Traits<V>::is_pair)
    return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
  else
    return mask ? yes : no;
}

// fp64 lanes of fp32 ones, in order.
inline Pair<f64r> widen(f32r x) {
  typedef float Half __attribute__((vector_size(kRegister / 2)));
  const auto halves = as<Pair<Half>>(x);
  return {__builtin_convertvector(halves.low, f64r), __builtin_convertvector(halves.high, f64r)};
}
template <class V>
inline auto widen(Pair<V> x) {
  return Pair<decltype(widen(x.low))>{widen(x.low), widen(x.high)};
}

}  // namespace qt::QT_ISA
