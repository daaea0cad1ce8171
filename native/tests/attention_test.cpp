// Attention forward and backward through the C ABI, against plain loops in double.
#include "ops.h"

namespace {

using namespace qt_test;

struct Case {
  std::vector<int64_t> lengths;
  int64_t heads, kv_heads, dim, window;
};

std::vector<Case> cases() {
  return {
      {{1}, 1, 1, 64, 0},          {{1, 2, 33}, 3, 1, 48, 0},  {{31, 32, 1}, 2, 2, 80, 0}, {{70}, 4, 2, 96, 0},
      {{65, 1, 5}, 2, 1, 128, 40}, {{47, 20}, 3, 3, 17, 5},    {{161}, 2, 1, 64, 33},      {{130}, 1, 1, 1, 0},
  };
}

// The stream's tensors in double, and everything that a bound needs.
struct Reference {
  Case shape;
  double scale;
  std::vector<double> q, k, v, dout;
  std::vector<int64_t> cu;

  std::vector<double> values(const Buffer &b, int64_t n) const {
    std::vector<double> out(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = b.get(i);
    return out;
  }
  int64_t tokens() const { return cu.back(); }
  size_t at(int64_t token, int64_t head, int64_t heads, int64_t d) const {
    return static_cast<size_t>((token * heads + head) * shape.dim + d);
  }
  Sum score(int64_t query, int64_t key, int64_t h, int64_t kv) const {
    Sum s;
    for (int64_t d = 0; d < shape.dim; ++d) s.add(scale * q[at(query, h, shape.heads, d)] * k[at(key, kv, shape.kv_heads, d)]);
    return s;
  }
  int64_t first_key(int64_t start, int64_t query) const {
    return shape.window && query - shape.window + 1 > start ? query - shape.window + 1 : start;
  }
  // A score errs by dim fp32 additions, which is a relative error of its exponential.
  double bound(int32_t dtype, double largest_score, int64_t length) const {
    return 4 * rounding_of(dtype) + (static_cast<double>(shape.dim) * (2 + largest_score) + static_cast<double>(length) + 32) * kUlp;
  }
  template <class Body>
  void rows_and_heads(const Body &body) const {
    for (size_t row = 0; row + 1 < cu.size(); ++row)
      for (int64_t h = 0; h < shape.heads; ++h)
        for (int64_t m = cu[row]; m < cu[row + 1]; ++m) body(cu[row], h, h / (shape.heads / shape.kv_heads), m);
  }
};

void check_forward(const Reference &r, int32_t dtype, const Buffer &out, const Guarded<float> &lse) {
  r.rows_and_heads([&](int64_t start, int64_t h, int64_t kv, int64_t m) {
    double top = -INFINITY, largest = 0.0, total = 0.0;
    std::vector<double> scores;
    for (int64_t j = r.first_key(start, m); j <= m; ++j) {
      const Sum s = r.score(m, j, h, kv);
      scores.push_back(s.value);
      top = s.value > top ? s.value : top;
      largest = s.size > largest ? s.size : largest;
    }
    for (double s : scores) total += std::exp(s - top);
    const double bound = r.bound(dtype, largest, m - start + 1), want = top + std::log(total);
    const int64_t at = m * r.shape.heads + h;
    const double slack = r.bound(QT_F32, largest, m - start + 1) * (1 + std::fabs(want));
    EXPECT(std::fabs(lse[at] - want) <= slack, "lse of token %d, head %d: want %.9g, got %.9g", int(m), int(h), want, lse[at]);
    for (int64_t d = 0; d < r.shape.dim; ++d) {
      Sum o;
      for (size_t i = 0; i < scores.size(); ++i)
        o.add(std::exp(scores[i] - want) * r.v[r.at(r.first_key(start, m) + static_cast<int64_t>(i), kv, r.shape.kv_heads, d)]);
      close("out", at * r.shape.dim + d, out.get(at * r.shape.dim + d), o, bound);
    }
  });
}

// From the `out` and `lse` that the kernel was given.
void check_backward(const Reference &r, int32_t dtype, const Buffer &out, const Guarded<float> &lse, const Buffer &dq,
                    const Buffer &dk, const Buffer &dv) {
  const Case &c = r.shape;
  std::vector<Sum> want_q(r.q.size()), want_k(r.k.size()), want_v(r.v.size());
  double largest = 0.0;
  r.rows_and_heads([&](int64_t start, int64_t h, int64_t kv, int64_t m) {
    Sum delta;
    for (int64_t d = 0; d < c.dim; ++d) delta.add(r.dout[r.at(m, h, c.heads, d)] * out.get(static_cast<int64_t>(r.at(m, h, c.heads, d))));
    for (int64_t j = r.first_key(start, m); j <= m; ++j) {
      const Sum s = r.score(m, j, h, kv);
      largest = s.size > largest ? s.size : largest;
      const double p = std::exp(s.value - lse[m * c.heads + h]);
      Sum dp;
      for (int64_t d = 0; d < c.dim; ++d) dp.add(r.dout[r.at(m, h, c.heads, d)] * r.v[r.at(j, kv, c.kv_heads, d)]);
      const double ds = r.scale * p * (dp.value - delta.value), size = r.scale * p * (dp.size + delta.size);
      for (int64_t d = 0; d < c.dim; ++d) {
        const size_t key = r.at(j, kv, c.kv_heads, d), query = r.at(m, h, c.heads, d);
        want_v[key].add(p * r.dout[query]);
        want_q[query].add(ds * r.k[key], size * std::fabs(r.k[key]));
        want_k[key].add(ds * r.q[query], size * std::fabs(r.q[query]));
      }
    }
  });
  const double bound = r.bound(dtype, largest, r.tokens() * c.heads / c.kv_heads);
  for (size_t i = 0; i < want_q.size(); ++i) close("dq", int64_t(i), dq.get(int64_t(i)), want_q[i], bound);
  for (size_t i = 0; i < want_k.size(); ++i) close("dk", int64_t(i), dk.get(int64_t(i)), want_k[i], bound);
  for (size_t i = 0; i < want_v.size(); ++i) close("dv", int64_t(i), dv.get(int64_t(i)), want_v[i], bound);
}

QT_TEST("ops", attention) {
  on_every_isa("attention", [](Random &random, int32_t dtype, const auto &run) {
    for (const Case &c : cases()) {
      Reference r{c, 0.0, {}, {}, {}, {}, {0}};
      for (int64_t length : c.lengths) r.cu.push_back(r.cu.back() + length);
      const int64_t queries = r.tokens() * c.heads * c.dim, keys = r.tokens() * c.kv_heads * c.dim, rows = r.tokens() * c.heads;
      const int64_t num_rows = static_cast<int64_t>(c.lengths.size());
      int64_t longest = 0;
      for (int64_t length : c.lengths) longest = length > longest ? length : longest;
      const qt_attention shape = {c.heads, c.kv_heads, c.dim, c.window, 1.0f / std::sqrt(static_cast<float>(c.dim))};
      Buffer q(dtype, queries), k(dtype, keys), v(dtype, keys), dout(dtype, queries);
      for (Buffer *b : {&q, &k, &v, &dout}) b->fill(random, 1.0f);
      r.scale = shape.scale;
      r.q = r.values(q, queries), r.k = r.values(k, keys), r.v = r.values(v, keys), r.dout = r.values(dout, queries);
      Guarded<int64_t> cu(num_rows + 1);
      for (int64_t i = 0; i <= num_rows; ++i) cu[i] = r.cu[static_cast<size_t>(i)];
      run([&](qt_context *context, bool first) {
        Buffer out(dtype, queries), dq(dtype, queries), dk(dtype, keys), dv(dtype, keys);
        Guarded<float> lse(rows);
        const auto forward = [&](void *scratch, size_t bytes) {
          return qt_attention_forward(context, dtype, out.data(), lse.data(), q.data(), k.data(), v.data(), cu.data(), num_rows,
                                      &shape, scratch, bytes);
        };
        const auto backward = [&](void *scratch, size_t bytes) {
          return qt_attention_backward(context, dtype, dq.data(), dk.data(), dv.data(), dout.data(), out.data(), lse.data(),
                                       q.data(), k.data(), v.data(), cu.data(), num_rows, &shape, scratch, bytes);
        };
        with_scratch("attention forward", qt_attention_forward_scratch_bytes(context, dtype, &shape, longest), forward);
        with_scratch("attention backward", qt_attention_backward_scratch_bytes(context, dtype, &shape, longest), backward);
        if (first) check_forward(r, dtype, out, lse);
        if (first) check_backward(r, dtype, out, lse, dq, dk, dv);
        return out.copy() + bytes_of(lse) + dq.copy() + dk.copy() + dv.copy();
      });
    }
  });
}

}  // namespace
