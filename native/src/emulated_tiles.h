// AMX's tile instructions in plain C++, for machines without them: the amx_bf16 kernels can then be tested anywhere.
// Only for tests (CMake option QUATRAIN_EMULATED_AMX): each instruction takes microseconds.
//
// Semantics: Intel SDM, TDPBF16PS and its kin. Even and odd products are summed apart over k, then added to the sum that
// is there. What the instructions would refuse stops the process.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace qt::QT_ISA {

struct EmulatedTiles {
  static constexpr int kRows = 16, kBytes = 64;
  bool configured = false;
  alignas(64) uint8_t data[8][kRows][kBytes];

  void configure(const void *memory) {
    const uint8_t *config = static_cast<const uint8_t *>(memory);
    bool full = config[0] == 1 && config[1] == 0;
    for (int t = 0; t < 8; ++t) {
      uint16_t bytes;
      std::memcpy(&bytes, config + 16 + 2 * t, 2);
      full = full && bytes == kBytes && config[48 + t] == kRows;
    }
    if (!full) stop("a configuration other than eight full tiles");
    if (configured) stop("configured again before a release");  // allowed there, but the kernels release what they take
    configured = true;
    std::memset(data, 0, sizeof data);
  }
  void release() {
    configured = false;
    std::memset(data, 0xFF, sizeof data);
  }
  void zero(int t) { std::memset(tile(t), 0, sizeof data[0]); }
  void load(int t, const void *from, size_t stride) {
    for (int r = 0; r < kRows; ++r) std::memcpy(tile(t)[r], static_cast<const uint8_t *>(from) + r * stride, kBytes);
  }
  void store(int t, void *to, size_t stride) {
    for (int r = 0; r < kRows; ++r) std::memcpy(static_cast<uint8_t *>(to) + r * stride, tile(t)[r], kBytes);
  }
  void multiply(int c, int a, int b) {
    float sums[16], left[2][16][16], right[2][16][16];  // even and odd; a [m][k], b [k][n]
    widen(left, tile(a));
    widen(right, tile(b));
    for (int m = 0; m < kRows; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 16; ++n) {
          even[n] += left[0][m][k] * right[0][k][n];
          odd[n] += left[1][m][k] * right[1][k][n];
        }
      std::memcpy(sums, tile(c)[m], sizeof sums);
      for (int n = 0; n < 16; ++n) sums[n] += even[n] + odd[n];
      std::memcpy(tile(c)[m], sums, sizeof sums);
    }
  }

 private:
  uint8_t (*tile(int t))[kBytes] {
    if (!configured) stop("a tile instruction on a thread without a configuration");
    return data[t];
  }
  static void widen(float (&out)[2][16][16], const uint8_t (*rows)[kBytes]) {
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 32; ++i) {
        uint16_t half;
        std::memcpy(&half, rows[r] + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(&out[i % 2][r][i / 2], &bits, 4);
      }
  }
  [[noreturn]] static void stop(const char *what) {
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
  }
};

inline thread_local EmulatedTiles emulated_tiles;

}  // namespace qt::QT_ISA

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_tiles.configure(config)
#define _tile_release() emulated_tiles.release()
#define _tile_zero(t) emulated_tiles.zero(t)
#define _tile_loadd(t, from, stride) emulated_tiles.load(t, from, stride)
#define _tile_stored(t, to, stride) emulated_tiles.store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_tiles.multiply(c, a, b)
