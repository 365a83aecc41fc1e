#pragma once
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace gdn::plan {

inline size_t worker_count() { return std::max<size_t>(1, std::thread::hardware_concurrency()); }

// Calls work(i, worker) for i in [0, n) on every core; the first exception is thrown again here.
template <class Work>
void for_each_parallel(size_t n, Work work) {
  const size_t workers = std::min(worker_count(), n);
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failed;
  auto loop = [&](size_t worker) {
    try {
      for (size_t i; (i = next.fetch_add(1)) < n;) work(i, worker);
    } catch (...) {
      std::lock_guard lock(failed);
      if (!failure) failure = std::current_exception();
      next = n;
    }
  };
  std::vector<std::thread> threads;
  for (size_t w = 1; w < workers; ++w) threads.emplace_back(loop, w);
  if (workers > 0) loop(0);
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
}

} // namespace gdn::plan
