// The building blocks of one ISA, compiled with its flags: bf16, exp, NF4, and the packed products.
#include "check.h"
#include "gemm_f32.h"
#if defined(__AVX512BF16__)
#include "gemm_tiles.h"
#endif

#include <cmath>
#include <limits>
#include <vector>

#define QT_TEXT_(x) #x
#define QT_TEXT(x) QT_TEXT_(x)
#define QT_ISA_TEST(name) QT_TEST(QT_TEXT(QT_ISA), name)

namespace qt::QT_ISA {
namespace {

using qt_test::Guarded;
using qt_test::Random;

bool runs_here() {
  for (int32_t isa = 0; isa < QT_NUM_ISAS; ++isa)
    if (std::strcmp(qt_isa_name(isa), QT_TEXT(QT_ISA)) == 0) return qt_isa_supported(isa);
  return false;
}
#define QT_NEEDS_ISA()                              \
  if (!runs_here()) {                               \
    std::printf("(this machine does not have it) "); \
    return;                                         \
  }

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// ---- bf16 ----------------------------------------------------------------------------------------------------------

// Vectors of instruction sets with bf16 round by an instruction that takes denormals for zero; scalars keep them.
uint32_t stored(uint32_t want, uint32_t from) {
#if defined(__AVX512BF16__)
  if ((from & 0x7F800000u) == 0) return want & 0x8000u;
#endif
  (void)from;
  return want;
}

QT_ISA_TEST(bf16_widens_and_comes_back) {
  QT_NEEDS_ISA();
  for (uint32_t first = 0; first < 65536; first += 16) {
    bf16 in[16], out[16];
    for (uint32_t i = 0; i < 16; ++i) in[i].bits = static_cast<uint16_t>(first + i);
    float wide[16];
    store16(wide, load16(in));
    store16(out, load16(in));
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t code = first + i;
      EXPECT(bits_of(wide[i]) == code << 16, "bf16 %04x: widened to %08x", code, bits_of(wide[i]));
      EXPECT(bits_of(to_float(in[i])) == code << 16, "bf16 %04x: to_float gave %08x", code, bits_of(to_float(in[i])));
      const bool nan = (code & 0x7FFF) > 0x7F80;
      const uint32_t want = nan ? code | 0x40 : code;  // NaN comes back quiet
      EXPECT(out[i].bits == stored(want, code << 16), "bf16 %04x: vector round trip gave %04x", code, out[i].bits);
      EXPECT(bf16_bits(to_float(in[i])) == want, "bf16 %04x: round trip gave %04x", code, bf16_bits(to_float(in[i])));
    }
  }
}

// Round to nearest, ties to even, by the neighbours' distances in double: independent of the integer trick.
uint16_t nearest_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  const uint16_t down = static_cast<uint16_t>(bits >> 16);  // towards zero
  if ((down & 0x7FFF) == 0x7F80) return down;
  const double low = float_of(static_cast<uint32_t>(down) << 16);
  const uint16_t up = static_cast<uint16_t>(down + 1);
  // Beyond the largest number the grid goes on: 2^128 stands for infinity.
  const double high = (up & 0x7FFF) == 0x7F80 ? std::copysign(std::ldexp(1.0, 128), low) : float_of(static_cast<uint32_t>(up) << 16);
  const double to_low = std::fabs(x - low), to_high = std::fabs(high - x);
  if (to_low != to_high) return to_low < to_high ? down : up;
  return down & 1 ? up : down;
}

QT_ISA_TEST(bf16_rounds_to_nearest_even) {
  QT_NEEDS_ISA();
  Random random(1);
  const uint32_t tails[16] = {0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF, 0x4000, 0x8000, 0x7FFF, 0};
  for (uint32_t head = 0; head < 65536; ++head) {
    float in[16];
    for (uint32_t i = 0; i < 16; ++i)
      in[i] = float_of(head << 16 | (i == 15 ? static_cast<uint32_t>(random.bits() & 0xFFFF) : tails[i]));
    bf16 out[16];
    store16(out, load16(in));
    for (int i = 0; i < 16; ++i) {
      const uint16_t want = nearest_bf16(in[i]);
      EXPECT(out[i].bits == stored(want, bits_of(in[i])), "%08x: want %04x, vector gave %04x", bits_of(in[i]), want,
             out[i].bits);
      EXPECT(bf16_bits(in[i]) == want, "%08x: want %04x, scalar gave %04x", bits_of(in[i]), want, bf16_bits(in[i]));
    }
  }
}

// ---- vectors -------------------------------------------------------------------------------------------------------

template <class T>
void check_parts() {
  for (int64_t n = 0; n <= 16; ++n) {
    Guarded<T> in(n), out(n);
    for (int64_t i = 0; i < n; ++i) in[i] = from_float<T>(static_cast<float>(i + 1));
    const f32x16 x = load_part(in.data(), n);
    alignas(64) float lanes[16];
    store16(lanes, x);
    for (int64_t i = 0; i < 16; ++i)
      EXPECT(lanes[i] == static_cast<float>(i < n ? i + 1 : 0), "part of %d: lane %d is %g", int(n), int(i), lanes[i]);
    store_part(out.data(), x, n);
    for (int64_t i = 0; i < n; ++i) EXPECT(to_float(out[i]) == static_cast<float>(i + 1), "part of %d: element %d", int(n), int(i));
  }
}

QT_ISA_TEST(parts_of_vectors) {
  QT_NEEDS_ISA();
  check_parts<float>();
  check_parts<bf16>();
}

QT_ISA_TEST(lanes_sum_and_max) {
  QT_NEEDS_ISA();
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(1 << i) * (i % 2 ? -1.0f : 1.0f);
  const f32x16 x = load16(lanes);
  EXPECT(sum_lanes(x) == -21845.0f, "sum is %g", sum_lanes(x));
  EXPECT(max_lanes(x) == 16384.0f, "max is %g", max_lanes(x));
  EXPECT(max_lanes(-x) == 32768.0f, "max is %g", max_lanes(-x));
}

// ---- exp -----------------------------------------------------------------------------------------------------------

double ulps(float got, double want) {
  int exponent;
  std::frexp(want, &exponent);
  const double ulp = std::ldexp(1.0, (exponent - 24 > -149 ? exponent - 24 : -149));
  return std::fabs(got - want) / ulp;
}

QT_ISA_TEST(exp_is_accurate) {
  QT_NEEDS_ISA();
  constexpr double kBound = 2.0;  // what common.h promises
  double worst = 0.0, at = 0.0;
  float in[16], out[16];
  // Every 499th float of either sign up to 88.72 (its exponential is the last that is finite) and down to -87.3.
  for (uint32_t sign : {0u, 0x80000000u}) {
    const float last = sign ? 87.3f : 88.72f;
    for (uint32_t bits = 0x20000000u; float_of(bits) <= last; bits += 16 * 499) {
      for (uint32_t i = 0; i < 16; ++i) in[i] = float_of(sign | (bits + i * 499));
      store16(out, exp16(load16(in)));
      for (int i = 0; i < 16; ++i) {
        if (std::fabs(in[i]) > last) continue;
        const double error = ulps(out[i], std::exp(static_cast<double>(in[i])));
        if (!(error <= worst)) worst = error, at = in[i];
      }
    }
  }
  std::printf("(%.3f ulp at %.9g) ", worst, at);
  EXPECT(worst <= kBound, "e^%.9g is off by %.3f ulp", at, worst);
}

QT_ISA_TEST(exp_at_the_edges) {
  QT_NEEDS_ISA();
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  alignas(64) const float x[16] = {0.0f, -0.0f, inf, -inf, nan, -87.4f, -1e30f, 88.8f, 1e30f, 1e-30f, -1e-40f, 1e-45f, -nan, 89.0f, -88.0f, -1e38f};
  alignas(64) float y[16];
  store16(y, exp16(load16(x)));
  for (int i : {0, 1, 9, 10, 11}) EXPECT(y[i] == 1.0f, "e^%g is %g", x[i], y[i]);
  for (int i : {3, 6, 15}) EXPECT(y[i] == 0.0f, "e^%g is %g", x[i], y[i]);
  // Below the normal numbers: 0, or the exponential as a denormal where the instruction set gives it for free.
  for (int i : {5, 14}) EXPECT(y[i] >= 0.0f && y[i] < std::numeric_limits<float>::min(), "e^%g is %g", x[i], y[i]);
  for (int i : {2, 7, 8, 13}) EXPECT(y[i] == inf, "e^%g is %g", x[i], y[i]);
  for (int i : {4, 12}) EXPECT(std::isnan(y[i]), "e^NaN is %g", y[i]);
}

// ---- products ------------------------------------------------------------------------------------------------------

// What a packed product sees of a value: tiles hold bf16.
template <class G>
double seen(float x) {
  return to_float(from_float<typename G::elem>(x));
}

template <class T>
Guarded<T> random_matrix(Random &random, int64_t rows, int64_t ld, int64_t cols) {
  Guarded<T> m(rows ? (rows - 1) * ld + cols : 0);  // ends at the last element that may be read
  for (int64_t i = 0; i < m.size(); ++i) m[i] = from_float<T>(random.uniform(-1.0f, 1.0f));
  return m;
}

// One block: C = A B^T (B [cols, k]) or A B (B [k, cols]), with A as it is or transposed, and a second segment on top.
template <class G, class T>
void check_block(Random &random, int64_t rows, int64_t cols, int64_t k, bool transposed, bool plain_b, bool accumulate) {
  using elem = typename G::elem;
  const int64_t k2 = 7, pad = static_cast<int64_t>(random.bits() % 3), total = transposed && plain_b ? k + 40 : k;
  const float scale = plain_b ? 1.0f : 0.75f;
  const int64_t lda = (transposed ? rows : k) + pad, ldb = (plain_b ? cols : k) + pad;
  auto a = transposed ? random_matrix<T>(random, k, lda, rows) : random_matrix<T>(random, rows, lda, k);
  auto b = plain_b ? random_matrix<T>(random, k, ldb, cols) : random_matrix<T>(random, cols, ldb, k);
  auto a2 = random_matrix<T>(random, rows, k2, k2);
  auto b2 = random_matrix<T>(random, cols, k2, k2);
  Guarded<elem> packed_a(32 * G::padded(total)), packed_b(32 * G::padded(total));
  Guarded<elem> packed_a2(32 * G::padded(k2)), packed_b2(32 * G::padded(k2));
  if (transposed)
    G::pack_a_t(packed_a.data(), a.data(), lda, k, rows, total);
  else
    G::pack_a(packed_a.data(), a.data(), lda, rows, k);
  if (plain_b)
    G::pack_b_nn(packed_b.data(), b.data(), ldb, k, cols, total);
  else
    G::pack_b_nt(packed_b.data(), b.data(), ldb, cols, k, scale);
  G::pack_a(packed_a2.data(), a2.data(), k2, rows, k2);
  G::pack_b_nt(packed_b2.data(), b2.data(), k2, cols, k2);

  Guarded<float> c(1024);
  if (accumulate)
    for (int64_t i = 0; i < 1024; ++i) c[i] = static_cast<float>(i % 13);
  const typename G::Segment segments[2] = {{packed_a.data(), packed_b.data(), G::padded(total)},
                                           {packed_a2.data(), packed_b2.data(), G::padded(k2)}};
  G::thread_begin();
  G::block(c.data(), segments, 2, accumulate);
  G::thread_end();

  for (int64_t m = 0; m < 32; ++m)
    for (int64_t n = 0; n < 32; ++n) {
      const double start = accumulate ? static_cast<double>((m * 32 + n) % 13) : 0.0;
      double sum = start, size = start;
      if (m < rows && n < cols) {
        for (int64_t i = 0; i < k; ++i) {
          const double x = seen<G>(to_float(transposed ? a[i * lda + m] : a[m * lda + i]));
          const double y = seen<G>(scale * static_cast<float>(seen<G>(to_float(plain_b ? b[i * ldb + n] : b[n * ldb + i]))));
          sum += x * y;
          size += std::fabs(x * y);
        }
        for (int64_t i = 0; i < k2; ++i) {
          const double term = seen<G>(to_float(a2[m * k2 + i])) * seen<G>(to_float(b2[n * k2 + i]));
          sum += term;
          size += std::fabs(term);
        }
      }
      // Each of the k sums errs by half an ulp of a partial sum, at most eps / 2 of the terms' sizes (AMX truncates: eps).
      const double bound = static_cast<double>(k + k2 + 2) * 1.2e-7 * size;
      EXPECT(std::fabs(c[m * 32 + n] - sum) <= bound,
             "%dx%dx%d%s%s%s at (%d, %d): want %.9g, got %.9g", int(rows), int(cols), int(k), transposed ? " A^T" : "",
             plain_b ? " B" : " B^T", accumulate ? " +=" : "", int(m), int(n), sum, c[m * 32 + n]);
    }
}

template <class G, class T>
void check_blocks() {
  Random random(7);
  const int64_t edges[] = {1, 2, 7, 15, 16, 17, 31, 32};
  const int64_t lengths[] = {1, 3, 31, 32, 33, 64, 77, 129};
  for (int64_t rows : edges)
    for (int64_t k : lengths)
      for (int flags = 0; flags < 8; ++flags) {
        const int64_t cols = edges[random.bits() % 8];
        check_block<G, T>(random, rows, cols, k, flags & 1, flags & 2, flags & 4);
      }
}

QT_ISA_TEST(f32_blocks) {
  QT_NEEDS_ISA();
  check_blocks<F32, float>();
  check_blocks<F32, bf16>();
}
#if defined(__AVX512BF16__)
QT_ISA_TEST(dot_blocks) {
  QT_NEEDS_ISA();
  check_blocks<GemmDot, float>();
  check_blocks<GemmDot, bf16>();
}
#endif
#if defined(__AMX_BF16__) || defined(QT_EMULATED_AMX)
QT_ISA_TEST(amx_blocks) {
  QT_NEEDS_ISA();
  check_blocks<GemmAmx, float>();
  check_blocks<GemmAmx, bf16>();
}
#endif

// ---- NF4 -----------------------------------------------------------------------------------------------------------

struct Nf4 {
  int64_t n, k;
  bool nested;
  Guarded<uint8_t> codes, absmax_codes;
  Guarded<float> absmax, absmax2, code2;

  Nf4(Random &random, int64_t rows, int64_t width, bool nest)
      : n(rows),
        k(width),
        nested(nest),
        codes(ceil_div(rows * width, 2)),
        absmax_codes(nest ? blocks(rows, width) : 0),
        absmax(nest ? 0 : blocks(rows, width)),
        absmax2(nest ? ceil_div(blocks(rows, width), 256) : 0),
        code2(nest ? 256 : 0) {
    for (int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(random.bits());
    for (int64_t i = 0; i < absmax_codes.size(); ++i) absmax_codes[i] = static_cast<uint8_t>(random.bits());
    for (int64_t i = 0; i < absmax.size(); ++i) absmax[i] = random.uniform(0.0f, 0.2f);
    for (int64_t i = 0; i < absmax2.size(); ++i) absmax2[i] = random.uniform(0.0f, 0.1f);
    for (int64_t i = 0; i < code2.size(); ++i) code2[i] = random.uniform(-1.0f, 1.0f);
  }
  static int64_t blocks(int64_t rows, int64_t width) { return ceil_div(rows * width, 64); }

  qt_weight weight() {
    qt_weight w = {};
    w.n = n;
    w.k = k;
    w.codes = codes.data();
    if (nested) {
      w.absmax_codes = absmax_codes.data();
      w.absmax2 = absmax2.data();
      w.code2 = code2.data();
      w.offset = 0.0625f;
    } else {
      w.absmax = absmax.data();
    }
    return w;
  }
  float value(int64_t row, int64_t column) const {
    static const float table[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    const int64_t flat = row * k + column, block = flat / 64;
    const uint8_t byte = codes[flat / 2];
    volatile float most;  // volatile: each step rounds, no fused product and sum
    if (nested) {
      most = code2[absmax_codes[block]] * absmax2[block / 256];
      most = most + 0.0625f;
    } else {
      most = absmax[block];
    }
    return table[flat % 2 ? byte % 16 : byte / 16] * most;
  }
};

template <class T>
float rounded_to(float x) {
  return to_float(from_float<T>(x));
}

// Reads a packed B block [k][32] back, exactly, with one-hot rows of A.
template <class G>
std::vector<float> unpack_b(const typename G::elem *packed, int64_t k) {
  std::vector<float> out(static_cast<size_t>(G::padded(k)) * 32);
  Guarded<float> c(1024);
  for (int64_t first = 0; first < k; first += 32) {
    const int64_t rows = k - first < 32 ? k - first : 32;
    Guarded<float> pick(rows * k);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < k; ++i) pick[r * k + i] = i == first + r ? 1.0f : 0.0f;
    Guarded<typename G::elem> a(32 * G::padded(k));
    G::pack_a(a.data(), pick.data(), k, rows, k);
    const typename G::Segment segment{a.data(), packed, G::padded(k)};
    G::thread_begin();
    G::block(c.data(), &segment, 1);
    G::thread_end();
    std::memcpy(out.data() + first * 32, c.data(), static_cast<size_t>(rows) * 32 * sizeof(float));
  }
  return out;
}

template <class G, class T>
void check_nf4() {
  Random random(11);
  for (bool nested : {false, true})
    for (int64_t k : {1, 31, 63, 64, 65, 96, 128, 200}) {
      const int64_t n = 35;
      Nf4 made(random, n, k, nested);
      const qt_weight w = made.weight();
      for (int64_t n0 : {0, 32}) {
        const int64_t cols = n - n0 < 32 ? n - n0 : 32;
        Guarded<typename G::elem> packed(32 * G::padded(k));
        G::template pack_nf4_nt<T>(packed.data(), w, n0, cols, 0, w.k);
        const auto got = unpack_b<G>(packed.data(), k);
        for (int64_t i = 0; i < k; ++i)
          for (int64_t c = 0; c < 32; ++c) {
            const float want = c < cols ? rounded_to<T>(made.value(n0 + c, i)) : 0.0f, is = got[static_cast<size_t>(i * 32 + c)];
            EXPECT(is == want, "nt, k %d, row %d, column %d: want %.9g, got %.9g", int(k), int(n0 + c), int(i), want, is);
          }
      }
      for (int64_t k0 = 0; k0 < k; k0 += 32) {
        const int64_t cols = k - k0 < 32 ? k - k0 : 32;
        Guarded<typename G::elem> packed(32 * G::padded(n));
        G::template pack_nf4_nn<T>(packed.data(), w, k0, cols, 0, w.n);
        const auto got = unpack_b<G>(packed.data(), n);
        for (int64_t row = 0; row < n; ++row)
          for (int64_t c = 0; c < 32; ++c) {
            const float want = c < cols ? rounded_to<T>(made.value(row, k0 + c)) : 0.0f, is = got[static_cast<size_t>(row * 32 + c)];
            EXPECT(is == want, "nn, k %d, row %d, column %d: want %.9g, got %.9g", int(k), int(row), int(k0 + c), want, is);
          }
      }
    }
}

QT_ISA_TEST(nf4_packs_exactly) {
  QT_NEEDS_ISA();
  check_nf4<F32, float>();
  check_nf4<F32, bf16>();
#if defined(__AVX512BF16__)
  check_nf4<GemmDot, bf16>();
#endif
#if defined(__AMX_BF16__) || defined(QT_EMULATED_AMX)
  check_nf4<GemmAmx, bf16>();
#endif
}

QT_ISA_TEST(nf4_rows) {
  QT_NEEDS_ISA();
  Random random(13);
  for (int64_t k : {5, 64, 99, 130}) {
    Nf4 made(random, 7, k, k == 99);
    const qt_weight w = made.weight();
    for (int64_t row = 0; row < 7; ++row)
      for (int64_t from : {int64_t{0}, k / 3})
        nf4_row<float>(w, row, from, k, [&](int64_t i, float got) {
          EXPECT(got == made.value(row, from + i), "k %d, row %d, column %d: want %.9g, got %.9g", int(k), int(row),
                 int(from + i), made.value(row, from + i), got);
        });
  }
}

}  // namespace
}  // namespace qt::QT_ISA
