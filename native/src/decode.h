// Linear layers for a few tokens, as generation has them: y = W x + bias + s B (A x) (+ residual), where reading W once is
// the cost. An item is a number of rows of W, for all tokens.
//
// NF4 codes are looked up on their way to the product: the table is the 16 codes times the block's absmax, rounded to T as
// a dequantised weight would be. A byte holds two neighbours, the even element high; so that codes need no shuffle, the
// rows of x are packed with the even elements of each step before the odd ones. Every output is the sum of two vectors
// of partial sums, each filled in the order of k, whatever the number of tokens or threads.
#pragma once

#include "common.h"
#include "nf4.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qt::QT_ISA {

// fp32 products, 16 to a vector; weights and x of either type are widened.
struct WideDot {
  using elem = float;
  using Vector = f32x16;
  static constexpr int64_t kStep = kLanes;
#if defined(__AVX512F__)
  static constexpr int kRows = 4, kTokens = 2;  // rows of W times tokens whose sums stay in registers
#else
  static constexpr int kRows = 2, kTokens = 1;
#endif

  template <class T>
  static Vector load(const T *p, int64_t left) {
    return left > 0 ? load_part(p, left) : splat(0.0f);
  }
  static void store(elem *p, Vector x) { store16(p, x); }
  static f32x16 dot(f32x16 sum, Vector w, Vector x) { return sum + w * x; }

  // The values of the 16 codes of a block.
  struct Table {
#if defined(__AVX512F__)
    __m512 values;
#elif defined(__AVX2__)
    __m256 low, high;
#else
    alignas(64) float values[16];
#endif
  };
  template <class T>
  static void make_table(Table &table, float absmax) {
    alignas(64) T rounded[16];
    store16(rounded, load16(kNf4Code) * absmax);
    const f32x16 values = load16(rounded);
    std::memcpy(&table, &values, sizeof(table));
  }
  template <class V>
  static auto lookup(const Table &table, Pair<V> index) {
    return Pair<decltype(lookup(table, index.low))>{lookup(table, index.low), lookup(table, index.high)};
  }
  static f32r lookup(const Table &table, i32r index) {
#if defined(__AVX512F__)
    return as<f32r>(_mm512_permutexvar_ps(as<__m512i>(index), table.values));
#elif defined(__AVX2__)
    const __m256i i = as<__m256i>(index);  // its bit 3, moved to the sign, chooses between the halves of the table
    return as<f32r>(_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, i), _mm256_permutevar8x32_ps(table.high, i),
                                     as<__m256>(_mm256_slli_epi32(i, 28))));
#else
    return f32r{table.values[index[0]], table.values[index[1]], table.values[index[2]], table.values[index[3]]};
#endif
  }
  // The even and the odd ones of 2 * kStep weights.
  static void unpack(Vector &even, Vector &odd, const uint8_t *codes, const Table &table) {
    const i32x16 wide = load_widened<i32x16>(codes);
    even = lookup(table, wide >> 4);
    odd = lookup(table, wide & 15);
  }
  template <class T>
  static void split(Vector &even, Vector &odd, const T *x) {
    alignas(64) float halves[2][kLanes];
    for (int64_t i = 0; i < 2 * kLanes; ++i) halves[i % 2][i / 2] = to_float(x[i]);
    even = load16(halves[0]);
    odd = load16(halves[1]);
  }
};

#if defined(__AVX512BF16__)
// vdpbf16ps: 16 sums of products of two neighbours.
struct PairDot {
  using elem = bf16;
  using Vector = __m512i;
  static constexpr int64_t kStep = 32;
  static constexpr int kRows = 4, kTokens = 2;

  static Vector load(const bf16 *p, int64_t left) {
    if (left >= kStep) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(left > 0 ? (1u << left) - 1u : 0u, p);
  }
  static void store(elem *p, Vector x) { _mm512_storeu_si512(p, x); }
  static f32x16 dot(f32x16 sum, Vector w, Vector x) {
    return as<f32x16>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(w), as<__m512bh>(x)));
  }

  // Twice, for a lookup by five bits of which the highest is the neighbour's.
  using Table = __m512i;
  template <class T>
  static void make_table(Table &table, float absmax) {
    const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(kNf4Code), _mm512_set1_ps(absmax));
    table = _mm512_broadcast_i64x4(as<__m256i>(_mm512_cvtneps_pbh(scaled)));
  }
  static void unpack(Vector &even, Vector &odd, const uint8_t *codes, const Table &table) {
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes)));
    even = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    odd = _mm512_permutexvar_epi16(words, table);
  }
  static void split(Vector &even, Vector &odd, const bf16 *x) {
    alignas(64) bf16 halves[2][kStep];
    for (int64_t i = 0; i < 2 * kStep; ++i) halves[i % 2][i / 2] = x[i];
    even = _mm512_load_si512(halves[0]);
    odd = _mm512_load_si512(halves[1]);
  }
};
#endif

// The sums of the lanes of four vectors, each in the same order.
inline void sum_lanes4(float out[4], const f32x16 x[4]) {
#if defined(__AVX512F__)
  const __m512 a = as<__m512>(x[0]), b = as<__m512>(x[1]), c = as<__m512>(x[2]), d = as<__m512>(x[3]);
  const __m512d ab = as<__m512d>(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = as<__m512d>(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  // Each quarter holds the four sums of its lanes.
  const __m512 sums = _mm512_add_ps(as<__m512>(_mm512_unpacklo_pd(ab, cd)), as<__m512>(_mm512_unpackhi_pd(ab, cd)));
  const __m512 half = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0x4E));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xB1))));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes(x[i]);
#endif
}

template <class D, class T>
struct Decode {
  using elem = typename D::elem;
  using Vector = typename D::Vector;
  using Table = typename D::Table;
  static constexpr int64_t kPair = 2 * D::kStep;  // elements of a step: one vector of even ones, one of odd ones
  static constexpr int64_t kItemBytes = 1 << 15;  // of weights that a thread takes at a time
  static constexpr int64_t kAhead = 4096;         // bytes

  static int64_t padded(int64_t k) { return round_up(k, kPair); }
  // Blocks that straddle rows go the slow way.
  static bool in_blocks(const qt_weight &w) { return w.codes && w.k % kNf4Block == 0; }

  struct Buffers {
    elem *plain, *split;  // [tokens, padded k]
    float *u[8];          // [tokens, rank in whole vectors], times the adapter's scale
    elem *rows;           // [threads][kRows, padded k]
    float *absmax;        // [threads][kRows, k / 64]
    Buffers(Scratch &s, const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads) {
      const int64_t k = linears[0].weight.k;
      plain = s.take<elem>(tokens * padded(k));
      split = s.take<elem>(tokens * padded(k));
      for (int64_t i = 0; i < count; ++i) u[i] = s.take<float>(tokens * round_up(linears[i].rank, kLanes));
      rows = s.take<elem>(threads * D::kRows * padded(k));
      absmax = s.take<float>(threads * D::kRows * ceil_div(k, kNf4Block));
    }
  };

  static size_t scratch(const qt_linear *linears, int64_t count, int64_t tokens, int32_t threads) {
    Scratch s(nullptr, 0);
    Buffers(s, linears, count, tokens, threads);
    return s.used;
  }

  static int run(Pool &pool, const T *x, const qt_linear *linears, int64_t count, const T *residual, int64_t tokens,
                 void *memory, size_t bytes) {
    Scratch scratch(memory, bytes);
    const Buffers f(scratch, linears, count, tokens, pool.threads());
    if (!scratch.ok()) return QT_SCRATCH_TOO_SMALL;
    pack(pool, f, x, linears, count, tokens);
    down(pool, f, linears, count, tokens);
    const int64_t k = linears[0].weight.k;
    int64_t first_item[9] = {0}, per_item[8];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row_bytes = linears[i].weight.codes ? ceil_div(k, 2) : k * static_cast<int64_t>(sizeof(T));
      per_item[i] = round_up(ceil_div(kItemBytes, row_bytes), D::kRows);
      first_item[i + 1] = first_item[i] + ceil_div(linears[i].weight.n, per_item[i]);
    }
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t thread) {
      int64_t i = 0;
      while (item >= first_item[i + 1]) ++i;
      const int64_t begin = (item - first_item[i]) * per_item[i];
      const int64_t end = begin + per_item[i] < linears[i].weight.n ? begin + per_item[i] : linears[i].weight.n;
      int64_t row = begin;
      for (; row + D::kRows <= end; row += D::kRows) up<D::kRows>(f, linears[i], f.u[i], residual, tokens, row, thread);
      for (; row < end; ++row) up<1>(f, linears[i], f.u[i], residual, tokens, row, thread);
    });
    return QT_OK;
  }

  // x with zeros up to whole steps: as it is for plain weights and adapters, even and odd apart for NF4.
  static void pack(Pool &pool, const Buffers &f, const T *x, const qt_linear *linears, int64_t count, int64_t tokens) {
    const int64_t k = linears[0].weight.k;
    bool plain = false, split = false;
    for (int64_t i = 0; i < count; ++i) {
      plain |= !in_blocks(linears[i].weight) || linears[i].rank > 0;
      split |= in_blocks(linears[i].weight);
    }
    pool.parallel_for(tokens, [&](int64_t t, int32_t) {
      for (int64_t j = 0; j < k; j += kPair) {
        const T *from = x + t * k + j;
        elem *to = f.plain + t * padded(k) + j;
        if (plain) {
          D::store(to, D::load(from, k - j));
          D::store(to + D::kStep, D::load(from + D::kStep, k - j - D::kStep));
        }
        if (split) {
          Vector even, odd;
          D::split(even, odd, from);
          D::store(f.split + t * padded(k) + j, even);
          D::store(f.split + t * padded(k) + j + D::kStep, odd);
        }
      }
    });
  }

  // u = A x, rounded to T for the caller, and times s for the sums.
  struct DownOutput {
    const qt_linear &l;
    float *scaled;
    int64_t ld;
    void add(f32x16 &, int64_t, int64_t) const {}
    void store(float sum, int64_t t, int64_t r) const {
      const T value = from_float<T>(sum);
      static_cast<T *>(l.u)[t * l.rank + r] = value;
      scaled[t * ld + r] = l.scale * to_float(value);
    }
  };
  static void down(Pool &pool, const Buffers &f, const qt_linear *linears, int64_t count, int64_t tokens) {
    const int64_t k = linears[0].weight.k;
    int64_t first_item[9] = {0};
    for (int64_t i = 0; i < count; ++i) first_item[i + 1] = first_item[i] + ceil_div(linears[i].rank, D::kRows);
    pool.parallel_for(first_item[count], [&](int64_t item, int32_t) {
      int64_t i = 0;
      while (item >= first_item[i + 1]) ++i;
      const qt_linear &l = linears[i];
      const int64_t begin = (item - first_item[i]) * D::kRows, ld = round_up(l.rank, kLanes);
      const T *a = static_cast<const T *>(l.lora_a);
      const DownOutput output{l, f.u[i], ld};
      if (begin + D::kRows <= l.rank) {
        products<D::kRows>(Plain<T>{a + begin * k, k, k}, f.plain, tokens, k, begin, output);
      } else {
        for (int64_t r = begin; r < l.rank; ++r) products<1>(Plain<T>{a + r * k, k, k}, f.plain, tokens, k, r, output);
      }
      for (int64_t r = l.rank; begin + D::kRows >= l.rank && r < ld; ++r)
        for (int64_t t = 0; t < tokens; ++t) f.u[i][t * ld + r] = 0.0f;
    });
  }

  struct Output {
    const qt_linear &l;
    const float *u;
    const T *residual;
    void add(f32x16 &sum, int64_t t, int64_t n) const {
      const T *b = static_cast<const T *>(l.lora_b) + n * l.rank;
      for (int64_t r = 0; r < l.rank; r += kLanes)
        sum += load_part(b + r, l.rank - r) * load16(u + t * round_up(l.rank, kLanes) + r);
    }
    void store(float sum, int64_t t, int64_t n) const {
      if (l.bias) sum += to_float(static_cast<const T *>(l.bias)[n]);
      if (residual) sum += to_float(residual[t * l.weight.n + n]);
      static_cast<T *>(l.out)[t * l.weight.n + n] = from_float<T>(sum);
    }
  };

  // Rows row .. row + R of one layer's output.
  template <int R>
  static void up(const Buffers &f, const qt_linear &l, const float *u, const T *residual, int64_t tokens, int64_t row,
                 int32_t thread) {
    const qt_weight &w = l.weight;
    const int64_t k = w.k;
    const Output output{l, u, residual};
    elem *rows = f.rows + thread * D::kRows * padded(k);
    if (!w.codes) {
      const T *dense = static_cast<const T *>(w.dense);
      if (tokens > D::kTokens) return products<R>(Plain<T>{dense + row * k, k, k}, f.plain, tokens, k, row, output);
      // Row by row, memory is read in order: twice as fast as four rows side by side (measured).
      for (int64_t n = row; n < row + R; ++n) products<1>(Plain<T>{dense + n * k, k, k}, f.plain, tokens, k, n, output);
      return;
    }
    if (!in_blocks(w)) {
      for (int64_t r = 0; r < R; ++r) {
        elem *to = rows + r * padded(k);
        nf4_row<T>(w, row + r, 0, k, [&](int64_t i, float value) { to[i] = from_float<elem>(value); });
        for (int64_t i = k; i < padded(k); ++i) to[i] = elem{};
      }
      return products<R>(Plain<elem>{rows, padded(k), padded(k)}, f.plain, tokens, k, row, output);
    }
    const int64_t blocks = k / kNf4Block;
    float *absmax = f.absmax + thread * D::kRows * blocks;
    const qt_weight statistics = w;  // a copy that no store can change
    for (int64_t i = 0; i < R * blocks; ++i) absmax[i] = block_absmax(statistics, row * blocks + i);
    Codes<R> codes{w.codes + row * k / 2, absmax, k, {}};
    if (tokens <= D::kTokens) return products<R>(codes, f.split, tokens, k, row, output);
    for (int64_t i = 0; i < k; i += kPair)
      for (int r = 0; r < R; ++r) {
        Vector even, odd;
        codes.get(even, odd, r, i);
        D::store(rows + r * padded(k) + i, even);
        D::store(rows + r * padded(k) + i + D::kStep, odd);
      }
    products<R>(Plain<elem>{rows, padded(k), padded(k)}, f.split, tokens, k, row, output);
  }

  // Where rows of W come from: memory, or codes. `get` is for whole steps, `tail` for what is left of k.
  template <class E>
  struct Plain {
    const E *rows;
    int64_t ld, k;
    void get(Vector &even, Vector &odd, int64_t r, int64_t i) const {
      even = D::load(rows + r * ld + i, D::kStep);
      odd = D::load(rows + r * ld + i + D::kStep, D::kStep);
    }
    void tail(Vector &even, Vector &odd, int64_t r, int64_t i) const {
      even = D::load(rows + r * ld + i, k - i);
      odd = D::load(rows + r * ld + i + D::kStep, k - i - D::kStep);
    }
  };
  template <int R>
  struct Codes {
    const uint8_t *codes;
    const float *absmax;
    int64_t k;
    Table tables[R];
    void get(Vector &even, Vector &odd, int64_t r, int64_t i) {
      // Four short rows side by side are more than the processor's own prefetch follows. W is one piece: what lies a page
      // ahead comes soon.
      __builtin_prefetch(codes + (r * k + i) / 2 + kAhead);
      if (i % kNf4Block == 0) D::template make_table<T>(tables[r], absmax[(r * k + i) / kNf4Block]);
      D::unpack(even, odd, codes + (r * k + i) / 2, tables[r]);
    }
    void tail(Vector &, Vector &, int64_t, int64_t) {}  // blocks are whole steps
  };

  // The products of R rows of W and x's tokens; `output` adds to the lanes of each (token, row) and stores their sum.
  template <int R, class Source, class Out>
  static void products(const Source &source, const elem *x, int64_t tokens, int64_t k, int64_t row, const Out &output) {
    int64_t t = 0;
    for (; t + D::kTokens <= tokens; t += D::kTokens) block<R, D::kTokens>(source, x, t, k, row, output);
    for (; t < tokens; ++t) block<R, 1>(source, x, t, k, row, output);
  }
  template <int R, int N, class Source, class Out>
  static void block(Source source, const elem *x, int64_t t, int64_t k, int64_t row, const Out &output) {
    f32x16 even[R][N], odd[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) even[r][n] = odd[r][n] = splat(0.0f);
    x += t * padded(k);
    const auto add = [&](int r, int64_t i, Vector w_even, Vector w_odd) {
      for (int n = 0; n < N; ++n) {
        even[r][n] = D::dot(even[r][n], w_even, D::load(x + n * padded(k) + i, D::kStep));
        odd[r][n] = D::dot(odd[r][n], w_odd, D::load(x + n * padded(k) + i + D::kStep, D::kStep));
      }
    };
    Vector w_even, w_odd;
    int64_t i = 0;
    for (; i + kPair <= source.k; i += kPair)
      for (int r = 0; r < R; ++r) {
        source.get(w_even, w_odd, r, i);
        add(r, i, w_even, w_odd);
      }
    if (i < source.k)
      for (int r = 0; r < R; ++r) {
        source.tail(w_even, w_odd, r, i);
        add(r, i, w_even, w_odd);
      }
    constexpr int kSums = (R * N + 3) / 4 * 4;
    f32x16 sums[kSums];
    for (int pad = R * N; pad < kSums; ++pad) sums[pad] = splat(0.0f);
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) sums[n * R + r] = even[r][n] + odd[r][n];
    for (int at = 0; at < R * N; ++at) output.add(sums[at], t + at / R, row + at % R);
    float totals[kSums];
    for (int at = 0; at < kSums; at += 4) sum_lanes4(totals + at, sums + at);
    for (int at = 0; at < R * N; ++at) output.store(totals[at], t + at / R, row + at % R);
  }
};

}  // namespace qt::QT_ISA
