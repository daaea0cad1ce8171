// A small thread pool: one parallel-for at a time, workers spin for a moment and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace qt {

// A function to call for each item, without allocation.
struct Task {
  void (*run)(void *data, int64_t item, int32_t thread);
  void *data;
};

class Pool {
 public:
  explicit Pool(int32_t threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int32_t threads() const { return threads_; }

  // Calls body(item, thread) for every item in [0, items), each exactly once, items claimed in order. Returns when all
  // are done. `thread` is in [0, threads) and no two calls that run at once share it.
  template <class Body>
  void parallel_for(int64_t items, const Body &body) {
    if (items <= 0) return;
    if (threads_ == 1 || items == 1) {
      for (int64_t i = 0; i < items; ++i) body(i, 0);
      return;
    }
    const Task task{[](void *data, int64_t item, int32_t thread) { (*static_cast<const Body *>(data))(item, thread); },
                    const_cast<void *>(static_cast<const void *>(&body))};
    run(task, items);
  }

 private:
  void run(Task task, int64_t items);
  void work(int32_t thread);
  void drain(int32_t thread);
  void join();

  const int32_t threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Task task_{nullptr, nullptr};
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int32_t> busy_{0};
  std::atomic<uint64_t> round_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace qt
