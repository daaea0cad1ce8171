// Head and cross-entropy through the C ABI, against plain loops in double.
#include "ops.h"

namespace {

using namespace qt_test;

struct Case {
  int64_t tokens, hidden, vocab, num_rows, chunk;
};

// Vocabularies that end inside a block, a vector and a slice; chunks with a tail; no row at all.
std::vector<Case> cases() {
  return {{1, 1, 2, 1, 32}, {5, 33, 50, 0, 32}, {70, 64, 257, 45, 32}, {40, 80, 300, 40, 40}, {67, 96, 1000, 66, 64}, {9, 47, 31, 3, 500}};
}

QT_TEST("ops", head_loss) {
  on_every_isa("head_loss", [](Random &random, int32_t dtype, const auto &run) {
    for (const Case &c : cases()) {
      Buffer hidden(dtype, c.tokens * c.hidden), head(dtype, c.vocab * c.hidden);
      hidden.fill(random, 1.0f);
      head.fill(random, 0.5f);
      Guarded<int64_t> rows(c.num_rows), targets(c.num_rows);
      for (int64_t i = 0; i < c.num_rows; ++i) {
        rows[i] = i + (c.tokens - c.num_rows) * (i > c.num_rows / 2);
        targets[i] = i == 0 ? c.vocab - 1 : i == 1 ? 0 : static_cast<int64_t>(random.bits() % static_cast<uint64_t>(c.vocab));
      }
      const auto check = [&](const Guarded<float> &losses, const Buffer &dhidden) {
        std::vector<bool> supervised(static_cast<size_t>(c.tokens));
        for (int64_t i = 0; i < c.num_rows; ++i) {
          supervised[static_cast<size_t>(rows[i])] = true;
          std::vector<double> logits;
          double top = -INFINITY, largest = 0.0, total = 0.0;
          for (int64_t v = 0; v < c.vocab; ++v) {
            Sum logit;
            for (int64_t j = 0; j < c.hidden; ++j) logit.add(double(hidden.get(rows[i] * c.hidden + j)) * head.get(v * c.hidden + j));
            logits.push_back(logit.value);
            top = logit.value > top ? logit.value : top;
            largest = logit.size > largest ? logit.size : largest;
          }
          for (double logit : logits) total += std::exp(logit - top);
          const double lse = top + std::log(total), want = lse - logits[static_cast<size_t>(targets[i])];
          const double fp32 = (static_cast<double>(c.hidden) * (2 + largest) + static_cast<double>(c.vocab) + 32) * kUlp;
          EXPECT(std::fabs(losses[i] - want) <= fp32 * (1 + std::fabs(lse)), "loss %d: want %.9g, got %.9g", int(i), want, losses[i]);
          for (int64_t j = 0; j < c.hidden; ++j) {
            Sum dx;
            for (int64_t v = 0; v < c.vocab; ++v) {
              const double p = std::exp(logits[static_cast<size_t>(v)] - lse), w = head.get(v * c.hidden + j);
              dx.add((p - (v == targets[i])) * w, (p + (v == targets[i])) * std::fabs(w));
            }
            close("dhidden", rows[i] * c.hidden + j, dhidden.get(rows[i] * c.hidden + j), dx, 4 * rounding_of(dtype) + fp32);
          }
        }
        for (int64_t i = 0; i < c.tokens * c.hidden; ++i)
          if (!supervised[static_cast<size_t>(i / c.hidden)])
            EXPECT(dhidden.get(i) == 0.0f, "dhidden %d of a row without a target is %g", int(i), dhidden.get(i));
      };
      run([&](qt_context *context, bool first) {
        Guarded<float> losses(c.num_rows), alone(c.num_rows);
        Buffer dhidden(dtype, c.tokens * c.hidden);
        const size_t bytes = qt_head_loss_scratch_bytes(context, dtype, c.chunk, c.hidden, c.vocab);
        const auto call = [&](Guarded<float> &to, void *gradient) {
          with_scratch("head_loss", bytes, [&](void *scratch, size_t size) {
            return qt_head_loss(context, dtype, to.data(), gradient, hidden.data(), rows.data(), targets.data(), c.num_rows,
                                head.data(), c.tokens, c.hidden, c.vocab, c.chunk, scratch, size);
          });
        };
        call(losses, dhidden.data());
        call(alone, nullptr);
        EXPECT(bytes_of(alone) == bytes_of(losses), "losses with and without the gradient differ");
        if (first) check(losses, dhidden);
        return bytes_of(losses) + dhidden.copy();
      });
    }
  });
}

}  // namespace
