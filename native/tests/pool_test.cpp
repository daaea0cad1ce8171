// The thread pool: every item once, whatever the numbers of threads and items; no two calls at once share a thread index.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace {

QT_TEST("pool", every_item_runs_once) {
  for (int32_t threads = 1; threads <= 4; ++threads) {
    qt::Pool pool(threads);
    EXPECT(pool.threads() == threads, "want %d threads, got %d", threads, pool.threads());
    for (int64_t items : {0, 1, 2, 3, 4, 5, 17, 1000})
      for (int round = 0; round < 200; ++round) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
        pool.parallel_for(items, [&](int64_t item, int32_t) { runs[static_cast<size_t>(item)].fetch_add(1); });
        int wrong = 0;
        for (auto &count : runs) wrong += count.load() != 1;
        EXPECT(wrong == 0, "%d threads, %d items: %d items did not run exactly once", threads, static_cast<int>(items), wrong);
      }
  }
}

// Plain memory: what one loop wrote, the next one reads, on whichever thread. The thread sanitizer judges the ordering.
QT_TEST("pool", rounds_see_each_other) {
  for (int32_t threads = 1; threads <= 4; ++threads) {
    qt::Pool pool(threads);
    std::vector<int64_t> values(37, 0);
    const int64_t last = static_cast<int64_t>(values.size()) - 1;
    constexpr int kRounds = 3000;
    for (int round = 0; round < kRounds; ++round)
      pool.parallel_for(last + 1, [&](int64_t item, int32_t) { values[static_cast<size_t>(round % 2 ? item : last - item)] += 1; });
    for (int64_t value : values) EXPECT(value == kRounds, "want %d, got %d", kRounds, static_cast<int>(value));
  }
}

QT_TEST("pool", thread_indices_are_exclusive) {
  for (int32_t threads = 2; threads <= 4; ++threads) {
    qt::Pool pool(threads);
    std::vector<std::atomic<int>> inside(static_cast<size_t>(threads));
    std::atomic<int> clashes{0};
    for (int round = 0; round < 300; ++round)
      pool.parallel_for(32, [&](int64_t, int32_t thread) {
        if (thread < 0 || thread >= threads || inside[static_cast<size_t>(thread)].fetch_add(1) != 0) clashes.fetch_add(1);
        inside[static_cast<size_t>(thread)].fetch_sub(1);
      });
    EXPECT(clashes.load() == 0, "%d threads: %d calls shared a thread index", threads, clashes.load());
  }
}

QT_TEST("pool", sleeping_workers_wake_up) {
  qt::Pool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // past the spinning
    std::atomic<int> runs{0};
    pool.parallel_for(7, [&](int64_t, int32_t) { runs.fetch_add(1); });
    EXPECT(runs.load() == 7, "want 7 items, got %d", runs.load());
  }
}

QT_TEST("pool", comes_and_goes) {
  for (int round = 0; round < 100; ++round) {
    auto pool = std::make_unique<qt::Pool>(1 + round % 4);
    std::atomic<int> runs{0};
    if (round % 3) pool->parallel_for(3, [&](int64_t, int32_t) { runs.fetch_add(1); });
    EXPECT(runs.load() == (round % 3 ? 3 : 0), "round %d: %d items", round, runs.load());
  }
}

}  // namespace
