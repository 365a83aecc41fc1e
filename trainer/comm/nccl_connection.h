#pragma once
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "core/error.h"
#include "kernels/common/check.h"
#include "kernels/common/launch.h"
#include "trainer/comm/nccl_world.h"

// What the world of nccl_world.h is made of.
namespace gdn::trainer {

// Events around exchanges, while somebody wants to know how long they take.
class Stopwatch {
public:
  ~Stopwatch() {
    for (const Taken& t : taken_)
      for (cudaEvent_t e : {t.before, t.after}) GDN_CUDA_NOTHROW(cudaEventDestroy(e));
  }
  void start() { running_ = true; }
  template <class F> void around(const TimedExchange& what, cudaStream_t stream, F&& work) {
    if (!running_) return work();
    Taken t{what, nullptr, nullptr};
    for (cudaEvent_t* e : {&t.before, &t.after}) GDN_CUDA(cudaEventCreate(e));
    taken_.push_back(t);
    GDN_CUDA(cudaEventRecord(t.before, stream));
    work();
    GDN_CUDA(cudaEventRecord(t.after, stream));
  }
  std::vector<TimedExchange> stop() {
    running_ = false;
    std::vector<TimedExchange> out;
    for (Taken& t : taken_) {
      float ms = 0;
      GDN_CUDA(cudaEventSynchronize(t.after));
      GDN_CUDA(cudaEventElapsedTime(&ms, t.before, t.after));
      t.what.seconds = static_cast<double>(ms) * 1e-3;
      out.push_back(t.what);
      for (cudaEvent_t e : {t.before, t.after}) GDN_CUDA_NOTHROW(cudaEventDestroy(e));
    }
    taken_.clear();
    return out;
  }

private:
  struct Taken {
    TimedExchange what;
    cudaEvent_t before, after;
  };
  bool running_ = false;
  std::vector<Taken> taken_;
};

ncclUniqueId new_nccl_id(); // throws Error{Nccl}

// What some ranks have together: NCCL's communicator, its stream, and who watches it. A peer that is lost or silent for
// longer than the options' patience ends the communicator; every call after that throws Error{Nccl}, or Error{DoesNotFit}
// where NCCL found no memory for its buffers.
class Connection {
public:
  // Together, with one id.
  Connection(int rank, int size, const ncclUniqueId& id, const NcclOptions& options);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  int rank() const { return rank_; }
  int size() const { return size_; }
  cudaStream_t stream() const { return stream_; }
  CUstream_st* compute() const { return options_.compute; }
  kernels::LaunchContext launch() const { return {.stream = stream_, .sm_count = options_.sm_count}; }
  // Memory for sums, kStaging bytes: larger ones go in blocks, of which every rank's piece has at most so many elements.
  static constexpr Bytes kStaging = Bytes{64} << 20;
  static constexpr std::int64_t piece_of(Bytes element, std::int64_t ranks) { return kStaging / element / ranks / 256 * 256; }
  std::byte* staging() const { return staging_; }
  // The staging memory, and an exchange of each kind: NCCL connects ranks and takes its buffers with the first. Together.
  void warm_up();

  void require_whole(); // throws if an exchange has failed
  void synchronise();

  // `work` on the own stream, behind what `compute` has got so far and, if it `waits`, before what it gets next.
  void ordered(const char* what, Bytes bytes, Stopwatch& watch, const std::function<void()>& work, bool waits = true);

  // Inside ordered().
  void copy(const std::byte* from, std::byte* to, Bytes bytes);
  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes);
  void send(const std::byte* data, Bytes bytes, int to);
  void receive(std::byte* data, Bytes bytes, int from);
  void exchange(std::span<const Part> to, std::span<const Part> from);

private:
  using Clock = std::chrono::steady_clock;

  void connect(const ncclUniqueId& id);
  void close();
  // Until a call on a communicator that does not block is under way. The mutex is held.
  void settle(const char* what, ncclResult_t result);
  // Ends the communicator and its kernels. The mutex is held.
  void give_up(Error why);
  void give_up_waiting(const std::string& what);
  void give_up_after(const std::string& what, ncclResult_t result);
  void ask_nccl(); // about errors that it found meanwhile; the mutex is held
  void require_whole_locked() const;
  // Work that neither ends nor changes for too long, or an error that NCCL found meanwhile, ends the communicator.
  void watch(const std::stop_token& stop);

  int rank_, size_;
  NcclOptions options_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
  std::byte* staging_ = nullptr;
  // What the watchdog reads.
  std::mutex mutex_;
  std::optional<Error> failure_;
  std::string last_ = "connecting";
  bool pending_ = false;
  Clock::time_point since_;
  std::jthread watchdog_;
};

} // namespace gdn::trainer
