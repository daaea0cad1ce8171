// What the tests of ops through the C ABI share: buffers of either dtype with guards, contexts, sums with their rounding
// bound, and the run of one case on every instruction set for one to four threads.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "quatrain.h"

namespace qt_test {

// A matrix of either dtype with plain access.
struct Buffer {
  int32_t dtype;
  Guarded<unsigned char> bytes;
  Buffer(int32_t type, int64_t count) : dtype(type), bytes(count * (type == QT_F32 ? 4 : 2)) {}
  void *data() { return bytes.data(); }
  float get(int64_t i) const {
    uint32_t wide = 0;
    if (dtype == QT_F32) {
      std::memcpy(&wide, bytes.data() + 4 * i, 4);
    } else {
      uint16_t narrow;
      std::memcpy(&narrow, bytes.data() + 2 * i, 2);
      wide = static_cast<uint32_t>(narrow) << 16;
    }
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  void fill(Random &random, float size) {
    const int64_t width = dtype == QT_F32 ? 4 : 2;
    for (int64_t i = 0; i < bytes.size() / width; ++i) {
      const float x = random.uniform(-size, size);
      uint32_t wide;
      std::memcpy(&wide, &x, 4);
      const uint16_t narrow = static_cast<uint16_t>(wide >> 16);
      std::memcpy(bytes.data() + width * i, dtype == QT_F32 ? static_cast<const void *>(&wide) : &narrow, static_cast<size_t>(width));
    }
  }
  std::string copy() const { return std::string(reinterpret_cast<const char *>(bytes.data()), bytes.bytes()); }
};

struct Context {
  qt_context *handle = nullptr;
  Context(int32_t isa, int32_t threads) {
    const int32_t status = qt_context_create(&handle, isa, threads);
    if (status != QT_OK) std::abort();
  }
  ~Context() { qt_context_destroy(handle); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
};

// A sum in double together with the sum of its terms' sizes, which bounds the rounding of any order of summation.
struct Sum {
  double value = 0.0, size = 0.0;
  void add(double term) { add(term, std::fabs(term)); }
  void add(double term, double magnitude) {
    value += term;
    size += magnitude;
  }
};

inline double rounding_of(int32_t dtype) { return std::ldexp(1.0, dtype == QT_F32 ? -24 : -8); }
constexpr double kUlp = 1.0 / (1 << 23);

// |got - want| <= (roundings to the dtype + fp32 roundings) of the terms' sizes.
inline void close(const char *what, int64_t index, double got, const Sum &want, double bound) {
  EXPECT(std::fabs(got - want.value) <= bound * want.size, "%s, element %d: want %.9g, got %.9g, bound %.2g", what, int(index),
         want.value, got, bound * want.size);
}

template <class T>
inline void fill(Guarded<T> &buffer, Random &random, float low, float high) {
  for (int64_t i = 0; i < buffer.size(); ++i) buffer[i] = random.uniform(low, high);
}
template <class T>
inline std::string bytes_of(const Guarded<T> &buffer) {
  return std::string(reinterpret_cast<const char *>(buffer.data()), buffer.bytes());
}

// call(scratch, bytes) with exactly what the size function says, and refused with one byte less.
template <class Call>
inline void with_scratch(const char *what, size_t bytes, const Call &call) {
  Guarded<unsigned char> scratch(static_cast<int64_t>(bytes));
  EXPECT(bytes > 0, "%s: its scratch is 0 bytes", what);
  EXPECT(call(scratch.data(), bytes - 1) == QT_SCRATCH_TOO_SMALL, "%s: one byte of scratch less is refused", what);
  const int32_t status = call(scratch.data(), bytes);
  EXPECT(status == QT_OK, "%s: status %d", what, status);
}

// run(context, first) makes its outputs anew, compares them with plain loops when `first`, and returns their bytes; one to
// four threads must give the same. `start` draws the inputs of an instruction set and a dtype.
template <class Start>
inline void on_every_isa(const char *what, const Start &start) {
  for (int32_t isa = 0; isa < QT_NUM_ISAS; ++isa) {
    if (!qt_isa_supported(isa)) continue;
    std::printf("%s ", qt_isa_name(isa));
    std::fflush(stdout);
    Random random(static_cast<uint64_t>(isa) + 17);
    for (int32_t dtype : {QT_F32, QT_BF16})
      start(random, dtype, [&](const auto &run) {
        const int before = failures();
        std::string bits;
        for (int32_t threads = 1; threads <= 4; ++threads) {
          const Context context(isa, threads);
          const std::string got = run(context.handle, threads == 1);
          if (threads == 1) bits = got;
          EXPECT(got == bits, "%s: %d threads give other bits than one", what, threads);
        }
        if (failures() != before) std::fprintf(stderr, "  in %s, %s\n", qt_isa_name(isa), dtype == QT_F32 ? "f32" : "bf16");
      });
  }
}

}  // namespace qt_test
