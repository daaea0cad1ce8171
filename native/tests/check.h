// What every native test needs: a registry, checks that say where and what, random numbers, and memory with guards.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace qt_test {

struct Test {
  const char *group;  // an ISA's name, or what the test is about
  const char *name;
  void (*run)();
  Test *next;
  static Test *&first() {
    static Test *head = nullptr;
    return head;
  }
  Test(const char *g, const char *n, void (*r)()) : group(g), name(n), run(r), next(first()) { first() = this; }
};

inline int &failures() {
  static int count = 0;
  return count;
}

__attribute__((format(printf, 4, 5))) inline bool expect(bool ok, const char *file, int line, const char *format, ...) {
  if (ok) return true;
  if (++failures() <= 20) {
    std::fprintf(stderr, "\n%s:%d: ", file, line);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "\n");
  }
  return false;
}

#define EXPECT(condition, ...) qt_test::expect((condition), __FILE__, __LINE__, __VA_ARGS__)
#define QT_TEST(group, name)                                       \
  static void test_##name();                                       \
  static qt_test::Test registered_##name(group, #name, test_##name); \
  static void test_##name()

// splitmix64 (S. Vigna, public domain): any seed will do, and every machine draws the same numbers.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t bits() {
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(bits() >> 40) * (1.0f / 16777216.0f);
  }
};

// `count` elements that end where an inaccessible page starts: one element too far, read or written by whatever
// instruction, is a fault. What lies before them is filled with a pattern and compared at the end. The elements start as
// NaN (all bits set), so that a read of what was never written shows.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = static_cast<size_t>(count) * sizeof(T);
    size_ = (bytes + page - 1) / page * page + 2 * page;
    base_ = static_cast<unsigned char *>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + size_ - page, page, PROT_NONE)) std::abort();
    front_ = size_ - page - bytes;
    std::memset(base_, kPattern, front_);
    std::memset(base_ + front_, 0xFF, bytes);
  }
  ~Guarded() {
    if (!base_) return;
    size_t bad = 0;
    for (size_t i = 0; i < front_; ++i) bad += base_[i] != kPattern;
    EXPECT(bad == 0, "%zu bytes in front of a buffer were written", bad);
    munmap(base_, size_);
  }
  Guarded(Guarded &&other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(other.size_), front_(other.front_), count_(other.count_) {}
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;

  T *data() { return reinterpret_cast<T *>(base_ + front_); }
  const T *data() const { return reinterpret_cast<const T *>(base_ + front_); }
  T &operator[](int64_t i) { return data()[i]; }
  const T &operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

 private:
  static constexpr unsigned char kPattern = 0xA5;
  unsigned char *base_;
  size_t size_, front_;
  int64_t count_;
};

}  // namespace qt_test
