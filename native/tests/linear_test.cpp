// Linear layers with NF4 or plain weights, bias, adapters, residual and dropout, through the C ABI: odd shapes against
// plain loops in double, guards around every buffer, the same bits for one to four threads, refusals.
#include <cmath>
#include <string>
#include <vector>

#include "ops.h"

namespace {

using namespace qt_test;

constexpr float kCode[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                             -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                             0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                             0.7229568362236023f, 1.0f};

struct Layer {
  int64_t n, rank;
  bool nf4, nested, bias;
};

struct Case {
  int64_t tokens, k;
  std::vector<Layer> layers;
  bool residual, dropout;
};

// The frozen parts of a case. Outputs are made anew for every run.
struct Inputs {
  const Case &shape;
  int32_t dtype;
  Buffer x, residual;
  Guarded<int64_t> keys;
  struct One {
    Guarded<uint8_t> codes, absmax_codes;
    Guarded<float> absmax, absmax2, code2;
    Buffer dense, bias, a, b, dout;
    float scale;
    qt_weight weight;
  };
  std::vector<One> layers;

  static int64_t dropout_keys(const Case &c) { return c.dropout ? c.tokens : 0; }

  Inputs(const Case &c, int32_t type, Random &random)
      : shape(c),
        dtype(type),
        x(type, c.tokens * c.k),
        residual(type, c.residual ? c.tokens * c.layers[0].n : 0),
        keys(dropout_keys(c)) {
    x.fill(random, 1.0f);
    residual.fill(random, 1.0f);
    for (int64_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(random.bits() & 0xFFFFFFFF);
    layers.reserve(c.layers.size());
    for (const Layer &l : c.layers) {
      const int64_t count = l.n * c.k, blocks = (count + 63) / 64;
      layers.push_back(One{Guarded<uint8_t>(l.nf4 ? (count + 1) / 2 : 0), Guarded<uint8_t>(l.nf4 && l.nested ? blocks : 0),
                           Guarded<float>(l.nf4 && !l.nested ? blocks : 0),
                           Guarded<float>(l.nf4 && l.nested ? (blocks + 255) / 256 : 0),
                           Guarded<float>(l.nf4 && l.nested ? 256 : 0), Buffer(type, l.nf4 ? 0 : count),
                           Buffer(type, l.bias ? l.n : 0), Buffer(type, l.rank * c.k), Buffer(type, l.n * l.rank),
                           Buffer(type, c.tokens * l.n), random.uniform(0.5f, 2.0f), qt_weight{}});
      One &one = layers.back();
      for (int64_t i = 0; i < one.codes.size(); ++i) one.codes[i] = static_cast<uint8_t>(random.bits());
      for (int64_t i = 0; i < one.absmax_codes.size(); ++i) one.absmax_codes[i] = static_cast<uint8_t>(random.bits());
      for (int64_t i = 0; i < one.absmax.size(); ++i) one.absmax[i] = random.uniform(0.0f, 0.2f);
      for (int64_t i = 0; i < one.absmax2.size(); ++i) one.absmax2[i] = random.uniform(0.0f, 0.1f);
      for (int64_t i = 0; i < one.code2.size(); ++i) one.code2[i] = random.uniform(-1.0f, 1.0f);
      for (Buffer *buffer : {&one.dense, &one.bias, &one.a, &one.b, &one.dout}) buffer->fill(random, 0.5f);
      qt_weight &w = one.weight;
      w.n = l.n;
      w.k = c.k;
      w.offset = 0.0625f;
      if (!l.nf4) w.dense = one.dense.data();
      if (l.nf4) w.codes = one.codes.data();
      if (l.nf4 && !l.nested) w.absmax = one.absmax.data();
      if (l.nf4 && l.nested) {
        w.absmax_codes = one.absmax_codes.data();
        w.absmax2 = one.absmax2.data();
        w.code2 = one.code2.data();
      }
    }
  }

  double w(size_t layer, int64_t row, int64_t column) const {
    const One &one = layers[layer];
    const int64_t flat = row * shape.k + column, block = flat / 64;
    if (!shape.layers[layer].nf4) return one.dense.get(flat);
    const uint8_t byte = one.codes[flat / 2];
    const float most = one.weight.absmax ? one.absmax[block] : one.code2[one.absmax_codes[block]] * one.absmax2[block / 256] + 0.0625f;
    return static_cast<double>(kCode[flat % 2 ? byte % 16 : byte / 16]) * most;
  }
};

constexpr double kDropout = 0.3;

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The formula of ops/dropout, written out again.
double mask(const Inputs &in, size_t layer, int64_t token, int64_t column) {
  if (!in.shape.dropout) return 1.0;
  const uint32_t row = mix(static_cast<uint32_t>(in.keys[token]) ^ mix(static_cast<uint32_t>(layer)));
  return mix(row ^ mix(static_cast<uint32_t>(column))) >= static_cast<uint32_t>(kDropout * 4294967296.0) ? 1.0 / (1.0 - kDropout) : 0.0;
}

// What one forward and backward wrote.
struct Outputs {
  Buffer dx;
  std::vector<Buffer> out, u;
  std::vector<Guarded<float>> grad_a, grad_b;
  static constexpr float kStart = 0.25f;  // gradients are added to what is there

  Outputs(Inputs &in, const Context &context) : dx(in.dtype, in.shape.tokens * in.shape.k) {
    const Case &c = in.shape;
    std::vector<qt_linear> group;
    const qt_dropout dropout = {c.dropout ? in.keys.data() : nullptr, kDropout};
    for (size_t i = 0; i < c.layers.size(); ++i) {
      const Layer &l = c.layers[i];
      out.emplace_back(in.dtype, c.tokens * l.n);
      u.emplace_back(in.dtype, c.tokens * l.rank);
      grad_a.emplace_back(l.rank * c.k);
      grad_b.emplace_back(l.n * l.rank);
      for (int64_t j = 0; j < l.rank * c.k; ++j) grad_a[i][j] = kStart;
      for (int64_t j = 0; j < l.rank * l.n; ++j) grad_b[i][j] = kStart;
      Inputs::One &one = in.layers[i];
      qt_linear linear = {};
      linear.weight = one.weight;
      linear.rank = l.rank;
      linear.scale = one.scale;
      linear.index = static_cast<int32_t>(i);
      if (l.bias) linear.bias = one.bias.data();
      if (l.rank) {
        linear.lora_a = one.a.data();
        linear.lora_b = one.b.data();
        linear.grad_a = grad_a[i].data();
        linear.grad_b = grad_b[i].data();
        linear.u = u[i].data();
      }
      linear.out = out[i].data();
      group.push_back(linear);
    }
    const int64_t count = static_cast<int64_t>(group.size());
    const void *residual = c.residual ? in.residual.data() : nullptr;
    const size_t forward = qt_linear_forward_scratch_bytes(context.handle, in.dtype, group.data(), count, c.tokens, &dropout);
    EXPECT(forward > 0, "forward scratch is 0 bytes");
    {
      Guarded<unsigned char> scratch(static_cast<int64_t>(forward));
      EXPECT(qt_linear_forward(context.handle, in.dtype, in.x.data(), group.data(), count, residual, c.tokens, &dropout,
                               scratch.data(), forward - 1) == QT_SCRATCH_TOO_SMALL,
             "one byte of scratch less is refused");
      const int32_t status = qt_linear_forward(context.handle, in.dtype, in.x.data(), group.data(), count, residual, c.tokens,
                                               &dropout, scratch.data(), forward);
      EXPECT(status == QT_OK, "forward: status %d", status);
    }
    {
      // The down product alone writes the same bits.
      Guarded<unsigned char> scratch(static_cast<int64_t>(forward));
      std::vector<Buffer> again;
      std::vector<qt_linear> down = group;
      for (size_t i = 0; i < down.size(); ++i) {
        again.emplace_back(in.dtype, c.tokens * down[i].rank);
        if (down[i].rank) down[i].u = again[i].data();
      }
      const int32_t status = qt_lora_down(context.handle, in.dtype, in.x.data(), down.data(), count, c.tokens, &dropout,
                                          scratch.data(), forward);
      EXPECT(status == QT_OK, "down: status %d", status);
      for (size_t i = 0; i < down.size(); ++i) EXPECT(again[i].copy() == u[i].copy(), "layer %d: down and forward differ", int(i));
    }
    for (size_t i = 0; i < group.size(); ++i) group[i].out = in.layers[i].dout.data();
    const size_t backward = qt_linear_backward_scratch_bytes(context.handle, in.dtype, group.data(), count, c.tokens);
    EXPECT(backward > 0, "backward scratch is 0 bytes");
    Guarded<unsigned char> scratch(static_cast<int64_t>(backward));
    EXPECT(qt_linear_backward(context.handle, in.dtype, dx.data(), in.x.data(), group.data(), count, c.tokens, &dropout,
                              scratch.data(), backward - 1) == QT_SCRATCH_TOO_SMALL,
           "one byte of scratch less is refused");
    const int32_t status = qt_linear_backward(context.handle, in.dtype, dx.data(), in.x.data(), group.data(), count, c.tokens,
                                              &dropout, scratch.data(), backward);
    EXPECT(status == QT_OK, "backward: status %d", status);
  }

  std::string bits() const {
    std::string all = dx.copy();
    for (size_t i = 0; i < out.size(); ++i) {
      all += out[i].copy() + u[i].copy();
      all.append(reinterpret_cast<const char *>(grad_a[i].data()), grad_a[i].bytes());
      all.append(reinterpret_cast<const char *>(grad_b[i].data()), grad_b[i].bytes());
    }
    return all;
  }
};

// Every value of a chain is rounded to the dtype at most four times (operands masked, scaled or kept, and the result), and
// each of `terms` fp32 additions errs by at most 2^-23 of the terms' sizes.
void compare(const Inputs &in, const char *what, int64_t layer, int64_t index, double got, const Sum &want, int64_t terms) {
  const double rounding = in.dtype == QT_F32 ? std::ldexp(1.0, -24) : std::ldexp(1.0, -9);
  const double bound = (4 * rounding + static_cast<double>(terms + 2) * std::ldexp(1.0, -23)) * want.size;
  EXPECT(std::fabs(got - want.value) <= bound, "%s, %s, tokens %d, k %d, layer %d, element %d: want %.9g, got %.9g, bound %.2g",
         what, in.dtype == QT_F32 ? "f32" : "bf16", int(in.shape.tokens), int(in.shape.k), int(layer), int(index), want.value,
         got, bound);
}

void check_forward(const Inputs &in, const Outputs &got) {
  const Case &c = in.shape;
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const Layer &l = c.layers[i];
    const Inputs::One &one = in.layers[i];
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t r = 0; r < l.rank; ++r) {
        Sum u;
        for (int64_t j = 0; j < c.k; ++j) u.add(mask(in, i, t, j) * in.x.get(t * c.k + j) * one.a.get(r * c.k + j));
        compare(in, "u", int64_t(i), t * l.rank + r, got.u[i].get(t * l.rank + r), u, c.k);
      }
      for (int64_t n = 0; n < l.n; ++n) {
        Sum y;
        for (int64_t j = 0; j < c.k; ++j) y.add(in.x.get(t * c.k + j) * in.w(i, n, j));
        for (int64_t r = 0; r < l.rank; ++r) y.add(static_cast<double>(one.scale) * got.u[i].get(t * l.rank + r) * one.b.get(n * l.rank + r));
        if (l.bias) y.add(one.bias.get(n));
        if (c.residual) y.add(in.residual.get(t * l.n + n));
        compare(in, "out", int64_t(i), t * l.n + n, got.out[i].get(t * l.n + n), y, c.k + l.rank);
      }
    }
  }
}

void check_backward(const Inputs &in, const Outputs &got) {
  const Case &c = in.shape;
  std::vector<Sum> dx(static_cast<size_t>(c.tokens * c.k));
  int64_t terms = 0;
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const Layer &l = c.layers[i];
    const Inputs::One &one = in.layers[i];
    terms += l.n + l.rank;
    std::vector<Sum> du(static_cast<size_t>(c.tokens * l.rank));  // scaled
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t n = 0; n < l.n; ++n) {
        const double d = one.dout.get(t * l.n + n);
        for (int64_t r = 0; r < l.rank; ++r) du[static_cast<size_t>(t * l.rank + r)].add(one.scale * d * one.b.get(n * l.rank + r));
        for (int64_t j = 0; j < c.k; ++j) dx[static_cast<size_t>(t * c.k + j)].add(d * in.w(i, n, j));
      }
    for (int64_t r = 0; r < l.rank; ++r)
      for (int64_t j = 0; j < c.k; ++j) {
        Sum da;
        da.add(Outputs::kStart);
        for (int64_t t = 0; t < c.tokens; ++t) {
          const Sum &d = du[static_cast<size_t>(t * l.rank + r)];
          const double m = mask(in, i, t, j), a = one.a.get(r * c.k + j), x = in.x.get(t * c.k + j);
          dx[static_cast<size_t>(t * c.k + j)].add(m * d.value * a, std::fabs(m * d.size * a));
          da.add(m * d.value * x, std::fabs(m * d.size * x));
        }
        compare(in, "dA", int64_t(i), r * c.k + j, got.grad_a[i][r * c.k + j], da, c.tokens + l.n);
      }
    for (int64_t n = 0; n < l.n; ++n)
      for (int64_t r = 0; r < l.rank; ++r) {
        Sum db;
        db.add(Outputs::kStart);
        for (int64_t t = 0; t < c.tokens; ++t) db.add(static_cast<double>(one.scale) * one.dout.get(t * l.n + n) * got.u[i].get(t * l.rank + r));
        compare(in, "dB", int64_t(i), n * l.rank + r, got.grad_b[i][n * l.rank + r], db, c.tokens);
      }
  }
  for (int64_t i = 0; i < c.tokens * c.k; ++i) compare(in, "dx", -1, i, got.dx.get(i), dx[static_cast<size_t>(i)], terms);
}

std::vector<Case> cases() {
  return {
      {1, 1, {{1, 1, false, false, false}}, false, false},
      {1, 64, {{1, 0, true, false, false}}, true, false},
      {3, 5, {{2, 0, false, false, true}}, false, false},
      {33, 65, {{33, 3, true, true, true}}, true, false},
      {31, 64, {{70, 16, true, true, false}, {17, 16, true, false, true}, {17, 16, true, true, true}}, false, false},
      {40, 130, {{64, 4, false, false, false}, {31, 0, true, true, false}}, false, true},
      {64, 128, {{96, 8, true, true, true}}, true, true},
      {70, 96, {{47, 33, true, false, false}, {5, 1, true, true, true}}, false, true},
      {2, 31, {{300, 64, false, false, true}}, false, true},
      {95, 33, {{32, 2, true, true, false}, {1, 65, true, false, false}}, false, false},
      // k a multiple of neither 32 nor 64 with slices that do not all have the same number of blocks.
      {9, 1000, {{290, 7, true, true, false}}, true, true},
      // Reductions that are cut: the forward's, then the backward's, in the middle of a layer.
      {35, 4224, {{33, 3, true, true, true}}, false, true},
      {35, 40, {{1100, 0, true, false, false}, {3100, 2, true, true, true}}, false, false},
  };
}

QT_TEST("linear", against_plain_loops_for_one_to_four_threads) {
  for (int32_t isa = 0; isa < QT_NUM_ISAS; ++isa) {
    if (!qt_isa_supported(isa)) continue;
    std::printf("%s ", qt_isa_name(isa));
    std::fflush(stdout);
    Random random(static_cast<uint64_t>(isa) + 3);
    for (const Case &c : cases())
      for (int32_t dtype : {QT_F32, QT_BF16}) {
        Inputs in(c, dtype, random);
        std::string bits;
        for (int32_t threads = 1; threads <= 4; ++threads) {
          const Outputs got(in, Context(isa, threads));
          if (threads == 1) {
            check_forward(in, got);
            check_backward(in, got);
            bits = got.bits();
          }
          EXPECT(got.bits() == bits, "%s, tokens %d, k %d: %d threads give other bits than one", qt_isa_name(isa),
                 int(c.tokens), int(c.k), threads);
        }
      }
  }
}

QT_TEST("api", refusals) {
  EXPECT(qt_abi_version() == QT_ABI_VERSION, "ABI version %d", qt_abi_version());
  EXPECT(qt_isa_supported(QT_PORTABLE) == 1, "portable kernels run everywhere");
  EXPECT(qt_isa_supported(qt_best_isa()) == 1, "the best ISA is supported");
  qt_context *context = nullptr;
  for (int32_t isa : {-1, int32_t{QT_NUM_ISAS}}) {
    EXPECT(qt_isa_supported(isa) == 0, "ISA %d is supported", isa);
    EXPECT(std::strcmp(qt_isa_name(isa), "unknown") == 0, "ISA %d has the name %s", isa, qt_isa_name(isa));
    EXPECT(qt_context_create(&context, isa, 1) == QT_UNSUPPORTED, "a context for ISA %d", isa);
  }
  for (int32_t threads : {0, -3, 1 << 20})
    EXPECT(qt_context_create(&context, QT_PORTABLE, threads) == QT_BAD_ARGUMENT, "a context with %d threads", threads);
  EXPECT(qt_context_create(nullptr, QT_PORTABLE, 1) == QT_BAD_ARGUMENT, "a context into nowhere");
  qt_context_destroy(nullptr);

  const Context one(QT_PORTABLE, 1);
  float x[4] = {1, 2, 3, 4}, w[4] = {1, 2, 3, 4}, out[4];
  alignas(64) unsigned char scratch[1 << 16];
  const qt_dropout none = {nullptr, 0.0};
  qt_linear linear = {};
  linear.weight.n = linear.weight.k = 2;
  linear.weight.dense = w;
  linear.out = out;
  const auto run = [&](qt_context *c, int32_t dtype, const void *input, int64_t count, int64_t tokens) {
    return qt_linear_forward(c, dtype, input, &linear, count, nullptr, tokens, &none, scratch, sizeof(scratch));
  };
  EXPECT(run(one.handle, QT_F32, x, 1, 2) == QT_OK, "a plain call works");
  EXPECT(run(nullptr, QT_F32, x, 1, 2) == QT_BAD_ARGUMENT, "no context");
  EXPECT(run(one.handle, 7, x, 1, 2) == QT_BAD_ARGUMENT, "no such dtype");
  EXPECT(run(one.handle, QT_F32, nullptr, 1, 2) == QT_BAD_ARGUMENT, "no input");
  EXPECT(run(one.handle, QT_F32, x, 0, 2) == QT_BAD_ARGUMENT, "no layers");
  EXPECT(run(one.handle, QT_F32, x, 9, 2) == QT_BAD_ARGUMENT, "nine layers");
  EXPECT(run(one.handle, QT_F32, x, 1, 0) == QT_BAD_ARGUMENT, "no tokens");
  linear.weight.dense = nullptr;
  EXPECT(run(one.handle, QT_F32, x, 1, 2) == QT_BAD_ARGUMENT, "no weight");
}

}  // namespace
