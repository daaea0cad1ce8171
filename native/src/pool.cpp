#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace qt {
namespace {

// Long enough to bridge the gap between two kernels of a block, short enough not to burn a core that others want.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int32_t threads) : threads_(threads) {
  try {
    for (int32_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system refuses another thread: end those that run, tell the caller
    join();
    throw;
  }
}

Pool::~Pool() { join(); }

void Pool::join() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto &worker : workers_) worker.join();
}

void Pool::run(Task task, int64_t items) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(threads_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  drain(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
}

void Pool::drain(int32_t thread) {
  for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) task_.run(task_.data, item, thread);
}

void Pool::work(int32_t thread) {
  uint64_t seen = 0;
  for (;;) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < kSpins) {
        relax();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    drain(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace qt
