// The decoding kernels through the C ABI: odd shapes against plain loops in double, guards around every buffer, the same
// bits for one to four threads, refusals.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "quatrain.h"

namespace {

using qt_test::Guarded;
using qt_test::Random;

// bf16 numbers by their bits; fp32 ones as they are.
constexpr int32_t dtype_of(float) { return QT_F32; }
constexpr int32_t dtype_of(uint16_t) { return QT_BF16; }
double value(float x) { return x; }
double value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
void set(float &to, float x) { to = x; }
void set(uint16_t &to, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  to = static_cast<uint16_t>(wide >> 16);
}

template <class T>
Guarded<T> draw(Random &random, int64_t count, float size) {
  Guarded<T> out(count);
  for (int64_t i = 0; i < count; ++i) set(out[i], random.uniform(-size, size));
  return out;
}
template <class T>
std::string bits(const Guarded<T> &buffer) {
  return std::string(reinterpret_cast<const char *>(buffer.data()), buffer.bytes());
}

struct Context {
  qt_context *handle = nullptr;
  Context(int32_t isa, int32_t threads) {
    if (qt_context_create(&handle, isa, threads) != QT_OK) std::abort();
  }
  ~Context() { qt_context_destroy(handle); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
};

// A sum in double with the sum of its terms' sizes, which bounds the rounding of any order of summation: the result and
// three operands are rounded to T, and each of `terms` fp32 additions errs by at most 2^-23 of the sizes.
struct Sum {
  double total = 0.0, size = 0.0;
  void add(double term) {
    total += term;
    size += std::fabs(term);
  }
  template <class T>
  bool agrees(T got, int64_t terms) const {
    const double rounding = std::ldexp(4.0, dtype_of(T{}) == QT_F32 ? -24 : -9);
    return std::fabs(value(got) - total) <= (rounding + static_cast<double>(terms + 2) * std::ldexp(1.0, -23)) * size;
  }
};

// ---- linear --------------------------------------------------------------------------------------------------------

enum Kind { kDense, kNf4, kNested };
struct Case {
  int64_t tokens, k, n, rank;
  Kind kind;
  bool bias, residual;
};

constexpr float kCode[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                             -0.18477343022833334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                             0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                             0.7229568362236023f, 1.0f};

// One layer with its statistics, and its values in double.
template <class T>
struct Weight {
  Guarded<T> dense;
  Guarded<uint8_t> codes, absmax_codes;
  Guarded<float> absmax, absmax2, code2;
  qt_weight weight = {};

  Weight(Random &random, const Case &c)
      : dense(draw<T>(random, c.kind == kDense ? c.n * c.k : 0, 0.5f)),
        codes(c.kind == kDense ? 0 : (c.n * c.k + 1) / 2),
        absmax_codes(c.kind == kNested ? blocks(c) : 0),
        absmax(draw<float>(random, c.kind == kNf4 ? blocks(c) : 0, 0.2f)),
        absmax2(draw<float>(random, c.kind == kNested ? (blocks(c) + 255) / 256 : 0, 0.1f)),
        code2(draw<float>(random, c.kind == kNested ? 256 : 0, 1.0f)) {
    for (int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(random.bits());
    for (int64_t i = 0; i < absmax_codes.size(); ++i) absmax_codes[i] = static_cast<uint8_t>(random.bits());
    weight.n = c.n;
    weight.k = c.k;
    weight.offset = 0.0625f;
    if (c.kind == kDense) weight.dense = dense.data();
    if (c.kind != kDense) weight.codes = codes.data();
    if (c.kind == kNf4) weight.absmax = absmax.data();
    if (c.kind == kNested) {
      weight.absmax_codes = absmax_codes.data();
      weight.absmax2 = absmax2.data();
      weight.code2 = code2.data();
    }
  }
  static int64_t blocks(const Case &c) { return (c.n * c.k + 63) / 64; }
  double at(int64_t i) const {
    if (weight.dense) return value(dense[i]);
    const float most = weight.absmax ? absmax[i / 64] : code2[absmax_codes[i / 64]] * absmax2[i / 64 / 256] + 0.0625f;
    return static_cast<double>(kCode[i % 2 ? codes[i / 2] % 16 : codes[i / 2] / 16]) * most;
  }
};

template <class T>
void check_linear(int32_t isa, const Case &c, Random &random) {
  const Guarded<T> x = draw<T>(random, c.tokens * c.k, 1.0f), a = draw<T>(random, c.rank * c.k, 0.5f);
  const Guarded<T> b = draw<T>(random, c.n * c.rank, 0.5f), bias = draw<T>(random, c.n, 0.5f);
  const Guarded<T> residual = draw<T>(random, c.tokens * c.n, 1.0f);
  const Weight<T> w(random, c);
  const float scale = 1.75f;
  std::string first;
  for (int32_t threads = 1; threads <= 4; ++threads) {
    Guarded<T> out(c.tokens * c.n), u(c.tokens * c.rank), plain(c.tokens * c.n);
    // Beside it, the same weight without an adapter: a group of two.
    qt_linear group[2] = {};
    group[0].weight = group[1].weight = w.weight;
    group[0].out = out.data();
    group[1].out = plain.data();
    group[0].rank = c.rank;
    group[0].scale = scale;
    if (c.bias) group[0].bias = bias.data();
    if (c.rank) {
      group[0].lora_a = a.data();
      group[0].lora_b = b.data();
      group[0].u = u.data();
    }
    const int64_t count = c.residual ? 1 : 2;
    const Context context(isa, threads);
    const size_t bytes = qt_linear_decode_scratch_bytes(context.handle, dtype_of(T{}), group, count, c.tokens);
    EXPECT(bytes > 0, "scratch is 0 bytes");
    Guarded<unsigned char> scratch(static_cast<int64_t>(bytes));
    const auto run = [&](size_t size) {
      return qt_linear_decode(context.handle, dtype_of(T{}), x.data(), group, count, c.residual ? residual.data() : nullptr,
                              c.tokens, scratch.data(), size);
    };
    EXPECT(run(bytes - 1) == QT_SCRATCH_TOO_SMALL, "one byte of scratch less is refused");
    EXPECT(run(bytes) == QT_OK, "decode fails");
    const std::string now = bits(out) + bits(u) + bits(plain);
    if (threads == 1) first = now;
    EXPECT(now == first, "%s, k %d: %d threads give other bits than one", qt_isa_name(isa), int(c.k), threads);
    if (threads > 1) continue;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t r = 0; r < c.rank; ++r) {
        Sum sum;
        for (int64_t i = 0; i < c.k; ++i) sum.add(value(x[t * c.k + i]) * value(a[r * c.k + i]));
        EXPECT(sum.agrees(u[t * c.rank + r], c.k), "%s, k %d: u of token %d, %d", qt_isa_name(isa), int(c.k), int(t), int(r));
      }
      for (int64_t n = 0; n < c.n; ++n) {
        Sum sum;
        for (int64_t i = 0; i < c.k; ++i) sum.add(value(x[t * c.k + i]) * w.at(n * c.k + i));
        if (count == 2) EXPECT(sum.agrees(plain[t * c.n + n], c.k), "%s, k %d: plain %d", qt_isa_name(isa), int(c.k), int(n));
        for (int64_t r = 0; r < c.rank; ++r) sum.add(scale * value(u[t * c.rank + r]) * value(b[n * c.rank + r]));
        if (c.bias) sum.add(value(bias[n]));
        if (c.residual) sum.add(value(residual[t * c.n + n]));
        EXPECT(sum.agrees(out[t * c.n + n], c.k + c.rank), "%s, %s, k %d: out of token %d, %d: want %.9g, got %.9g",
               qt_isa_name(isa), dtype_of(T{}) == QT_F32 ? "f32" : "bf16", int(c.k), int(t), int(n), sum.total,
               value(out[t * c.n + n]));
      }
    }
  }
}

QT_TEST("decode", linear_against_plain_loops_for_one_to_four_threads) {
  const Case cases[] = {
      {1, 1, 1, 1, kDense, false, false},     {1, 64, 1, 0, kNf4, true, false},     {1, 128, 70, 16, kNested, true, true},
      {2, 65, 33, 3, kNested, true, false},   {3, 104, 10, 5, kDense, true, true},  {2, 192, 67, 33, kNf4, false, false},
      {17, 64, 41, 8, kNested, false, false}, {5, 31, 9, 17, kNf4, false, true},    {1, 1000, 150, 4, kDense, false, false},
      {4, 1024, 37, 1, kNested, false, true}, {1, 320, 411, 0, kNested, false, true},
  };
  for (int32_t isa = 0; isa < QT_NUM_ISAS; ++isa) {
    if (!qt_isa_supported(isa)) continue;
    Random random(static_cast<uint64_t>(isa) + 5);
    for (const Case &c : cases) {
      check_linear<float>(isa, c, random);
      check_linear<uint16_t>(isa, c, random);
    }
  }
}

// ---- attention -----------------------------------------------------------------------------------------------------

struct Past {
  std::vector<int64_t> lengths;
  int64_t slots, heads, kv_heads, dim, window;
};

template <class T>
void check_attention(int32_t isa, const Past &c, Random &random) {
  const int64_t rows = static_cast<int64_t>(c.lengths.size()), ld = c.kv_heads * c.dim, per_kv = c.heads / c.kv_heads;
  const Guarded<T> q = draw<T>(random, rows * c.heads * c.dim, 1.0f), k = draw<T>(random, rows * ld, 1.0f);
  const Guarded<T> v = draw<T>(random, rows * ld, 1.0f), old_keys = draw<T>(random, rows * c.slots * ld, 1.0f);
  const Guarded<T> old_values = draw<T>(random, rows * c.slots * ld, 1.0f);
  const float scale = 0.4f;
  const qt_attention shape = {c.heads, c.kv_heads, c.dim, c.window, scale};
  std::string first;
  for (int32_t threads = 1; threads <= 4; ++threads) {
    Guarded<T> out(rows * c.heads * c.dim), keys(old_keys.size()), values(old_values.size());
    Guarded<int64_t> lengths(rows);
    for (int64_t i = 0; i < rows; ++i) lengths[i] = c.lengths[static_cast<size_t>(i)];
    // Slots that no row has reached keep the NaN they start with.
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = row * c.slots * ld; i < (row * c.slots + lengths[row] - 1) * ld; ++i) {
        keys[i] = old_keys[i];
        values[i] = old_values[i];
      }
    const Context context(isa, threads);
    const size_t bytes = qt_attention_cached_scratch_bytes(context.handle, dtype_of(T{}), &shape, c.slots);
    Guarded<unsigned char> scratch(static_cast<int64_t>(bytes));
    const auto run = [&](size_t size) {
      return qt_attention_cached(context.handle, dtype_of(T{}), out.data(), q.data(), k.data(), v.data(), keys.data(),
                                 values.data(), lengths.data(), rows, c.slots, &shape, scratch.data(), size);
    };
    EXPECT(run(bytes - 1) == QT_SCRATCH_TOO_SMALL, "one byte of scratch less is refused");
    EXPECT(run(bytes) == QT_OK, "cached attention fails");
    lengths[0] = 0;
    EXPECT(run(bytes) == QT_BAD_ARGUMENT, "a row of no tokens");
    lengths[0] = c.slots + 1;
    EXPECT(run(bytes) == QT_BAD_ARGUMENT, "a row longer than its slots");
    lengths[0] = c.lengths[0];
    const std::string now = bits(out) + bits(keys) + bits(values);
    if (threads == 1) first = now;
    EXPECT(now == first, "%s, dim %d: %d threads give other bits than one", qt_isa_name(isa), int(c.dim), threads);
    if (threads > 1) continue;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t last = row * c.slots + lengths[row] - 1;
      EXPECT(std::memcmp(&keys[last * ld], &k[row * ld], static_cast<size_t>(ld) * sizeof(T)) == 0, "the key of row %d", int(row));
      EXPECT(std::memcmp(&values[last * ld], &v[row * ld], static_cast<size_t>(ld) * sizeof(T)) == 0, "the value of row %d", int(row));
      const int64_t begin = c.window && lengths[row] > c.window ? lengths[row] - c.window : 0;
      for (int64_t h = 0; h < c.heads; ++h) {
        std::vector<double> p;
        double total = 0.0;
        for (int64_t j = begin; j < lengths[row]; ++j) {
          double score = 0.0;
          for (int64_t d = 0; d < c.dim; ++d)
            score += value(q[(row * c.heads + h) * c.dim + d]) * value(keys[(row * c.slots + j) * ld + h / per_kv * c.dim + d]);
          p.push_back(std::exp(scale * score));
          total += p.back();
        }
        for (int64_t d = 0; d < c.dim; ++d) {
          Sum sum;
          for (int64_t j = begin; j < lengths[row]; ++j)
            sum.add(p[static_cast<size_t>(j - begin)] / total * value(values[(row * c.slots + j) * ld + h / per_kv * c.dim + d]));
          const T got = out[(row * c.heads + h) * c.dim + d];
          // Scores of size up to 0.4 dim come from dim additions: each probability errs by about that many ulps.
          EXPECT(sum.agrees(got, lengths[row] + c.dim * c.dim), "%s, dim %d: out of row %d, head %d, %d: want %.9g, got %.9g",
                 qt_isa_name(isa), int(c.dim), int(row), int(h), int(d), sum.total, value(got));
        }
      }
    }
  }
}

QT_TEST("decode", attention_against_plain_loops_for_one_to_four_threads) {
  const Past cases[] = {
      {{1}, 1, 1, 1, 1, 0},       {{1, 4, 11}, 13, 4, 2, 8, 0},   {{40, 17, 1}, 40, 9, 3, 16, 0},
      {{33, 5}, 64, 10, 2, 7, 4}, {{16, 15}, 16, 4, 4, 33, 100}, {{29}, 30, 6, 1, 64, 16},
  };
  for (int32_t isa = 0; isa < QT_NUM_ISAS; ++isa) {
    if (!qt_isa_supported(isa)) continue;
    Random random(static_cast<uint64_t>(isa) + 6);
    for (const Past &c : cases) {
      check_attention<float>(isa, c, random);
      check_attention<uint16_t>(isa, c, random);
    }
  }
}

}  // namespace
