// The gradient norm and AdamW through the C ABI, against plain loops in double.
#include "ops.h"

namespace {

using namespace qt_test;

QT_TEST("ops", sum_squares) {
  on_every_isa("sum_squares", [](Random &random, int32_t, const auto &run) {
    for (int64_t n : {0, 1, 7, 8, 1 << 14, (1 << 14) + 1, 3 * (1 << 14) - 5}) {
      Guarded<float> grad(n);
      fill(grad, random, -2.0f, 2.0f);
      run([&](qt_context *context, bool first) {
        Guarded<double> partial(qt_sum_squares_partials(n)), out(1);
        const int32_t status = qt_sum_squares(context, out.data(), grad.data(), n, partial.data());
        EXPECT(status == QT_OK, "status %d", status);
        Sum want;
        for (int64_t i = 0; i < n; ++i) want.add(double(grad[i]) * grad[i]);
        if (first) close("sum_squares", n, out[0], want, static_cast<double>(n) * std::ldexp(1.0, -53));
        return bytes_of(out);
      });
    }
  });
}

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.1, kRate = 3e-3, kScale = 0.37;

QT_TEST("ops", adamw) {
  on_every_isa("adamw", [](Random &random, int32_t, const auto &run) {
    for (int64_t n : {1, 15, 16, 33, (1 << 14) + 5})
      for (uint8_t skipped : {0, 1}) {
        Guarded<float> grad(n), p0(n), m0(n), v0(n);
        fill(grad, random, -2.0f, 2.0f);
        fill(p0, random, -1.0f, 1.0f);
        fill(m0, random, -0.1f, 0.1f);
        fill(v0, random, 0.0f, 0.1f);
        Guarded<double> scale(1), lr(1);
        Guarded<uint8_t> skip(1);
        Guarded<int64_t> step(1);
        scale[0] = kScale, lr[0] = kRate, skip[0] = skipped, step[0] = 6;
        run([&](qt_context *context, bool first) {
          Guarded<float> p(n), m(n), v(n);
          std::memcpy(p.data(), p0.data(), p.bytes());
          std::memcpy(m.data(), m0.data(), m.bytes());
          std::memcpy(v.data(), v0.data(), v.bytes());
          Buffer copy(QT_BF16, n);
          const int32_t status = qt_adamw(context, p.data(), m.data(), v.data(), copy.data(), grad.data(), scale.data(),
                                          skip.data(), lr.data(), step.data(), kBeta1, kBeta2, kEps, kDecay, n);
          EXPECT(status == QT_OK, "status %d", status);
          for (int64_t i = 0; first && i < n; ++i) {
            Sum want_p, want_m, want_v, rounded;
            if (skipped) {
              want_p.add(p0[i]), want_m.add(m0[i]), want_v.add(v0[i]);
            } else {
              const double g = grad[i] * kScale;
              want_m.add(m0[i] * kBeta1), want_m.add(g * (1 - kBeta1));
              want_v.add(v0[i] * kBeta2), want_v.add(g * g * (1 - kBeta2));
              const double root = std::sqrt(want_v.value / (1 - std::pow(kBeta2, 7))) + kEps, rate = kRate / (1 - std::pow(kBeta1, 7));
              want_p.add(p0[i] * (1 - kRate * kDecay));
              want_p.add(-rate * want_m.value / root, rate * want_m.size / root);
            }
            const double bound = skipped ? 0.0 : 8 * kUlp;
            close("param", i, p[i], want_p, bound);
            close("exp_avg", i, m[i], want_m, bound);
            close("exp_avg_sq", i, v[i], want_v, bound);
            rounded.add(p[i]);
            close("copy", i, copy.get(i), rounded, rounding_of(QT_BF16));
          }
          EXPECT(skip[0] == skipped && step[0] == 6 && lr[0] == kRate && scale[0] == kScale, "what is only read was written");
          return bytes_of(p) + bytes_of(m) + bytes_of(v) + copy.copy();
        });
      }
  });
}

}  // namespace
