// NF4 quantising, nested statistics, dequantising and the check through the C ABI, against plain loops.
#include "ops.h"

namespace {

using namespace qt_test;

constexpr float kCode[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                             -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                             0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                             0.7229568362236023f, 1.0f};

// How many midpoints lie below the scaled value: the nearest code, the lower one on a tie.
int nearest(float scaled) {
  int code = 0;
  for (int c = 0; c < 15; ++c) code += scaled > (kCode[c] + kCode[c + 1]) / 2;
  return code;
}

int code_at(const Guarded<uint8_t> &codes, int64_t i) { return i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4; }

// All items of the pool's loops, partial blocks and groups, an odd number of elements.
constexpr int64_t kCounts[] = {1, 2, 15, 17, 63, 64, 65, 79, 64 * 256 + 1, 64 * 8192 * 2 + 77};

QT_TEST("ops", nf4) {
  on_every_isa("nf4", [](Random &random, int32_t dtype, const auto &run) {
    Guarded<uint8_t> bins(65536);
    for (int64_t i = 0; i < bins.size(); ++i) bins[i] = static_cast<uint8_t>(i >> 8);
    Guarded<float> code2(256);
    fill(code2, random, -1.0f, 1.0f);
    for (int64_t n : kCounts) {
      const int64_t blocks = (n + 63) / 64, groups = (blocks + 255) / 256;
      Buffer x(dtype, n);
      x.fill(random, 0.1f);
      const auto check_codes = [&](const Guarded<uint8_t> &codes, const Guarded<float> &absmax) {
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t end = b * 64 + 64 < n ? b * 64 + 64 : n;
          float most = 0.0f;
          for (int64_t i = b * 64; i < end; ++i) most = std::fmax(most, std::fabs(x.get(i)));
          EXPECT(absmax[b] == most, "n %d, absmax %d: want %.9g, got %.9g", int(n), int(b), most, absmax[b]);
          const float reciprocal = 1.0f / most;
          for (int64_t i = b * 64; i < end; ++i) {
            const int want = nearest(end == b * 64 + 64 ? x.get(i) * reciprocal : x.get(i) / most);
            EXPECT(code_at(codes, i) == want, "n %d, code %d: want %d, got %d", int(n), int(i), want, code_at(codes, i));
          }
        }
        if (n % 2) EXPECT((codes[n / 2] & 15) == 7, "the missing last element is the code of 0");
      };
      const auto check_nested = [&](const Guarded<float> &absmax, const Guarded<uint8_t> &codes, const Guarded<float> &scales) {
        for (int64_t b = 0; b < blocks; ++b) {
          float most = 0.0f;
          for (int64_t i = b / 256 * 256; i < blocks && i < b / 256 * 256 + 256; ++i) most = std::fmax(most, std::fabs(absmax[i] - 0.05f));
          EXPECT(scales[b / 256] == most, "n %d, absmax2 %d: want %.9g, got %.9g", int(n), int(b / 256), most, scales[b / 256]);
          volatile float bin = ((absmax[b] - 0.05f) * (1.0f / most) + 1.0f) * 0.5f * 65535.0f;  // rounded before the sum
          bin = bin + 0.5f;
          EXPECT(codes[b] == static_cast<int>(bin) >> 8, "n %d, nested code %d: want %d, got %d", int(n), int(b),
                 static_cast<int>(bin) >> 8, codes[b]);
        }
      };
      run([&](qt_context *context, bool first) {
        Guarded<uint8_t> codes((n + 1) / 2), absmax_codes(blocks);
        Guarded<float> absmax(blocks), absmax2(groups);
        Guarded<int32_t> finite(1);
        Guarded<double> sums(2);
        Buffer out(dtype, n);
        int32_t status = qt_nf4_quantize(context, dtype, codes.data(), absmax.data(), finite.data(), x.data(), n);
        EXPECT(status == QT_OK && finite[0] == 1, "quantize: status %d, finite %d", status, finite[0]);
        status = qt_nf4_nested(context, absmax_codes.data(), absmax2.data(), absmax.data(), 0.05f, bins.data(), blocks);
        EXPECT(status == QT_OK, "nested: status %d", status);
        qt_weight w = {};
        w.n = 1, w.k = n, w.codes = codes.data(), w.absmax_codes = absmax_codes.data(), w.absmax2 = absmax2.data();
        w.code2 = code2.data(), w.offset = 0.05f;
        status = qt_nf4_dequantize(context, dtype, out.data(), &w);
        EXPECT(status == QT_OK, "dequantize: status %d", status);
        status = qt_nf4_error(context, dtype, sums.data(), sums.data() + 1, &w, x.data());
        EXPECT(status == QT_OK, "error: status %d", status);
        if (first) {
          check_codes(codes, absmax);
          check_nested(absmax, absmax_codes, absmax2);
          Sum error, norm;
          for (int64_t i = 0; i < n; ++i) {
            volatile float most = code2[absmax_codes[i / 64]] * absmax2[i / 64 / 256];
            most = most + 0.05f;
            const float value = kCode[code_at(codes, i)] * most, difference = value - x.get(i);
            Sum want;
            want.add(value);
            close("dequantised", i, out.get(i), want, dtype == QT_F32 ? 0.0 : rounding_of(dtype));
            error.add(double(difference) * difference);
            norm.add(double(x.get(i)) * x.get(i));
          }
          // The difference may be rounded once or, fused with the product, not before the end.
          close("error", n, sums[0], error, 1e-5);
          close("norm", n, sums[1], norm, 1e-12);
        }
        std::string all = bytes_of(codes) + bytes_of(absmax) + bytes_of(absmax_codes) + bytes_of(absmax2) + out.copy();
        return all + bytes_of(sums);
      });
    }
  });
}

}  // namespace
