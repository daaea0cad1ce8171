// RMSNorm, RoPE, SwiGLU and embedding through the C ABI, against plain loops in double.
#include "ops.h"

namespace {

using namespace qt_test;

constexpr float kEps = 1e-5f, kStart = 0.25f;  // gradients are added to what is there

struct Rows {
  int64_t rows, dim;
};
std::vector<Rows> row_cases() { return {{1, 1}, {1, 16}, {17, 15}, {33, 65}, {70, 48}, {5, 577}, {16, 128}}; }

QT_TEST("ops", rms_norm) {
  on_every_isa("rms_norm", [](Random &random, int32_t dtype, const auto &run) {
    for (const Rows &c : row_cases()) {
      const int64_t n = c.rows * c.dim;
      Buffer x(dtype, n), dout(dtype, n), residual(dtype, n);
      for (Buffer *b : {&x, &dout, &residual}) b->fill(random, 2.0f);
      Guarded<float> weight(c.dim);
      fill(weight, random, 0.5f, 1.5f);
      const double bound = 4 * rounding_of(dtype) + static_cast<double>(c.dim + 8) * kUlp;
      const auto check = [&](const Buffer &out, const Guarded<float> &rstd, const Buffer &dx, const Buffer &plain,
                             const Guarded<float> &dweight) {
        std::vector<Sum> dw(static_cast<size_t>(c.dim));
        for (Sum &sum : dw) sum.add(kStart);
        for (int64_t row = 0; row < c.rows; ++row) {
          double squares = 0.0;
          Sum dot;
          for (int64_t i = 0; i < c.dim; ++i) {
            const double v = x.get(row * c.dim + i);
            squares += v * v;
            dot.add(double(dout.get(row * c.dim + i)) * weight[i] * v);
          }
          const double scale = 1.0 / std::sqrt(squares / static_cast<double>(c.dim) + kEps);
          EXPECT(std::fabs(rstd[row] - scale) <= static_cast<double>(c.dim + 8) * kUlp * scale, "rstd %d: want %.9g, got %.9g",
                 int(row), scale, rstd[row]);
          const double share = scale * scale / static_cast<double>(c.dim);
          for (int64_t i = 0; i < c.dim; ++i) {
            const int64_t at = row * c.dim + i;
            const double v = x.get(at), g = double(dout.get(at)) * weight[i];
            Sum o, d;
            o.add(v * scale * weight[i]);
            close("out", at, out.get(at), o, bound);
            d.add(g * scale);
            d.add(-v * dot.value * share * scale, std::fabs(v) * dot.size * share * scale);
            close("dx", at, plain.get(at), d, bound);
            d.add(residual.get(at));
            close("dx and residual", at, dx.get(at), d, bound);
            dw[static_cast<size_t>(i)].add(double(dout.get(at)) * v * scale);
          }
        }
        for (int64_t i = 0; i < c.dim; ++i)
          close("dweight", i, dweight[i], dw[static_cast<size_t>(i)], static_cast<double>(c.rows + c.dim + 8) * kUlp);
      };
      run([&](qt_context *context, bool first) {
        Buffer out(dtype, n), dx(dtype, n), plain(dtype, n);
        Guarded<float> rstd(c.rows), dweight(c.dim);
        for (int64_t i = 0; i < c.dim; ++i) dweight[i] = kStart;
        int32_t status = qt_rms_norm_forward(context, dtype, out.data(), rstd.data(), x.data(), weight.data(), kEps, c.rows, c.dim);
        EXPECT(status == QT_OK, "forward: status %d", status);
        status = qt_rms_norm_backward(context, dtype, dx.data(), dweight.data(), dout.data(), x.data(), rstd.data(),
                                      weight.data(), residual.data(), c.rows, c.dim);
        EXPECT(status == QT_OK, "backward: status %d", status);
        status = qt_rms_norm_backward(context, dtype, plain.data(), nullptr, dout.data(), x.data(), rstd.data(), weight.data(),
                                      nullptr, c.rows, c.dim);
        EXPECT(status == QT_OK, "backward alone: status %d", status);
        if (first) check(out, rstd, dx, plain, dweight);
        return out.copy() + bytes_of(rstd) + dx.copy() + plain.copy() + bytes_of(dweight);
      });
    }
  });
}

QT_TEST("ops", rope) {
  struct Case {
    int64_t tokens, heads, dim, half;
  };
  on_every_isa("rope", [](Random &random, int32_t dtype, const auto &run) {
    for (const Case &c : {Case{1, 1, 2, 1}, Case{17, 3, 48, 24}, Case{33, 1, 80, 40}, Case{5, 2, 96, 20}, Case{19, 2, 128, 64}}) {
      const int64_t n = c.tokens * c.heads * c.dim;
      Buffer x(dtype, n);
      x.fill(random, 2.0f);
      Guarded<float> cosines(c.tokens * c.half), sines(c.tokens * c.half);
      for (int64_t i = 0; i < cosines.size(); ++i) {
        const float angle = random.uniform(-3.0f, 3.0f);
        cosines[i] = std::cos(angle), sines[i] = std::sin(angle);
      }
      for (float sign : {1.0f, -1.0f})
        run([&](qt_context *context, bool first) {
          Buffer turned(dtype, n);
          std::memcpy(turned.data(), x.data(), turned.bytes.bytes());
          const int32_t status = qt_rope(context, dtype, turned.data(), cosines.data(), sines.data(), sign, c.tokens, c.heads, c.dim, c.half);
          EXPECT(status == QT_OK, "status %d", status);
          for (int64_t i = 0; first && i < n; ++i) {
            const int64_t token = i / c.dim / c.heads, d = i % c.dim, pair = token * c.half + d % c.half;
            const bool low = d < c.half;
            Sum want;
            if (d >= 2 * c.half) {
              want.add(x.get(i));
            } else {
              want.add(double(x.get(i)) * cosines[pair]);
              want.add((low ? -sign : sign) * double(x.get(low ? i + c.half : i - c.half)) * sines[pair]);
            }
            close("rope", i, turned.get(i), want, d >= 2 * c.half ? 0.0 : 2 * rounding_of(dtype) + 2 * kUlp);
          }
          return turned.copy();
        });
    }
  });
}

QT_TEST("ops", swiglu) {
  on_every_isa("swiglu", [](Random &random, int32_t dtype, const auto &run) {
    for (int64_t n : {1, 15, 16, 17, 1000, (1 << 14) + 3, (1 << 15) + 16}) {
      Buffer gate(dtype, n), up(dtype, n), dout(dtype, n);
      gate.fill(random, 9.0f);
      up.fill(random, 2.0f);
      dout.fill(random, 2.0f);
      run([&](qt_context *context, bool first) {
        Buffer out(dtype, n), dgate(dtype, n), dup(dtype, n);
        int32_t status = qt_swiglu_forward(context, dtype, out.data(), gate.data(), up.data(), n);
        EXPECT(status == QT_OK, "forward: status %d", status);
        status = qt_swiglu_backward(context, dtype, dgate.data(), dup.data(), dout.data(), gate.data(), up.data(), n);
        EXPECT(status == QT_OK, "backward: status %d", status);
        for (int64_t i = 0; first && i < n; ++i) {
          const double g = gate.get(i), u = up.get(i), d = dout.get(i), s = 1.0 / (1.0 + std::exp(-g)), rest = 1.0 / (1.0 + std::exp(g));
          const double bound = 2 * rounding_of(dtype) + 16 * kUlp;
          Sum o, dg, du;
          o.add(g * s * u);
          close("out", i, out.get(i), o, bound);
          // The sigmoid's complement is 1 - s in fp32: s, not the complement, bounds its rounding.
          dg.add(d * u * s);
          dg.add(d * u * s * g * rest, std::fabs(d * u * s * g));
          close("dgate", i, dgate.get(i), dg, bound);
          du.add(d * g * s);
          close("dup", i, dup.get(i), du, bound);
        }
        return out.copy() + dgate.copy() + dup.copy();
      });
    }
  });
}

QT_TEST("ops", embedding) {
  on_every_isa("embedding", [](Random &random, int32_t dtype, const auto &run) {
    for (const Rows &c : row_cases()) {
      constexpr int64_t kVocab = 37;
      Buffer table(dtype, kVocab * c.dim);
      table.fill(random, 2.0f);
      Guarded<int64_t> ids(c.rows);
      for (int64_t i = 0; i < c.rows; ++i) ids[i] = i == 0 ? kVocab - 1 : static_cast<int64_t>(random.bits() % kVocab);
      run([&](qt_context *context, bool first) {
        Buffer out(dtype, c.rows * c.dim);
        const int32_t status = qt_embedding(context, dtype, out.data(), ids.data(), table.data(), c.rows, c.dim);
        EXPECT(status == QT_OK, "status %d", status);
        for (int64_t i = 0; first && i < c.rows * c.dim; ++i)
          EXPECT(out.get(i) == table.get(ids[i / c.dim] * c.dim + i % c.dim), "element %d is %g", int(i), out.get(i));
        return out.copy();
      });
    }
  });
}

}  // namespace
