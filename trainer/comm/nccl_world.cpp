#include "trainer/comm/nccl_world.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include "core/error.h"
#include "kernels/common/check.h"
#include "kernels/common/ordered_sum.h"

namespace gdn::trainer {

namespace {

using Clock = std::chrono::steady_clock;

constexpr Bytes kStaging = Bytes{64} << 20; // of a sum: larger ones go in blocks
constexpr auto kPause = std::chrono::milliseconds(20);

[[noreturn]] void fail(const std::string& what, ncclResult_t result) {
  throw Error(ErrorCode::Nccl, fmt::format("{}: {}", what, ncclGetErrorString(result)), "NCCL_DEBUG=INFO says more");
}

class NcclCommunicator final : public Communicator {
public:
  NcclCommunicator(std::unique_ptr<Communicator> host, const NcclOptions& options) : host_(std::move(host)), options_(options) {
    GDN_CUDA(cudaGetDevice(&device_));
    GDN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* e : {&ready_, &done_}) GDN_CUDA(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    if (size() == 1) return;
    void* staging = nullptr;
    GDN_CUDA(cudaMalloc(&staging, static_cast<size_t>(kStaging)));
    staging_ = static_cast<std::byte*>(staging);
    connect();
    watchdog_ = std::jthread([this](std::stop_token stop) { watch(stop); });
  }
  ~NcclCommunicator() override {
    if (watchdog_.joinable()) {
      watchdog_.request_stop();
      watchdog_.join();
    }
    if (comm_ && failure_.empty()) close();
    GDN_CUDA_NOTHROW(cudaFree(staging_));
    GDN_CUDA_NOTHROW(cudaEventDestroy(ready_));
    GDN_CUDA_NOTHROW(cudaEventDestroy(done_));
    GDN_CUDA_NOTHROW(cudaStreamDestroy(stream_));
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void all_reduce(std::byte* data, std::int64_t elements, DType dtype, Reduction reduction) override {
    if (size() == 1) return;
    const Bytes element = size_of(dtype);
    const std::int64_t ranks = size(), block = kStaging / element / 256 * 256; // the pieces of all ranks fill the staging memory
    ordered("all_reduce", [&] {
      for (std::int64_t first = 0; first < elements; first += block) {
        const std::int64_t n = std::min(block, elements - first), piece = (n + ranks - 1) / ranks;
        auto part = [&](std::int64_t r) { // of rank r in this block
          const std::int64_t from = std::min(r * piece, n), to = std::min(from + piece, n);
          return Part{data + (first + from) * element, (to - from) * element};
        };
        const Part mine = part(rank());
        std::vector<Part> all, to, from;
        for (int r = 0; r < size(); ++r) {
          all.push_back(part(r));
          to.push_back(mine);
          from.push_back({staging_ + r * mine.bytes, mine.bytes});
        }
        exchange(all, from);
        kernels::reduce_in_order(staging_, size(), mine.bytes / element, dtype, reduction == Reduction::Max, mine.data, launch());
        exchange(to, all);
      }
    });
  }

  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) override {
    ordered("all_gather", [&] {
      if (size() == 1) copy(mine, all, bytes);
      else call("ncclAllGather", [&] { return ncclAllGather(mine, all, static_cast<size_t>(bytes), ncclUint8, comm_, stream_); });
    });
  }

  void reduce_scatter(const std::byte* all, std::byte* mine, std::int64_t elements, DType dtype) override {
    const Bytes element = size_of(dtype);
    if (size() == 1) return ordered("reduce_scatter", [&] { copy(all, mine, elements * element); });
    const std::int64_t block = kStaging / element / size() / 256 * 256;
    ordered("reduce_scatter", [&] {
      for (std::int64_t first = 0; first < elements; first += block) {
        const Bytes bytes = std::min(block, elements - first) * element;
        std::vector<Part> to, from;
        for (int r = 0; r < size(); ++r) {
          to.push_back({const_cast<std::byte*>(all) + (r * elements + first) * element, bytes});
          from.push_back({staging_ + r * bytes, bytes});
        }
        exchange(to, from);
        kernels::reduce_in_order(staging_, size(), bytes / element, dtype, false, mine + first * element, launch());
      }
    });
  }

  void all_to_all(std::span<const Part> to, std::span<const Part> from) override {
    ordered("all_to_all", [&] { exchange(to, from); });
  }

  void send(int to, int tag, const std::byte* data, Bytes bytes) override {
    message_.resize(static_cast<size_t>(bytes));
    GDN_CUDA(cudaMemcpyAsync(message_.data(), data, message_.size(), cudaMemcpyDeviceToHost, options_.compute));
    GDN_CUDA(cudaStreamSynchronize(options_.compute));
    require_whole();
    host_->send(to, tag, message_.data(), bytes);
  }
  void receive(int from, int tag, std::byte* data, Bytes bytes) override {
    message_.resize(static_cast<size_t>(bytes));
    host_->receive(from, tag, message_.data(), bytes);
    GDN_CUDA(cudaMemcpyAsync(data, message_.data(), message_.size(), cudaMemcpyHostToDevice, options_.compute));
    GDN_CUDA(cudaStreamSynchronize(options_.compute));
  }
  void barrier() override {
    GDN_CUDA(cudaStreamSynchronize(stream_));
    require_whole();
    host_->barrier();
  }
  void sum_on_host(std::span<double> values) override {
    require_whole();
    host_->sum_on_host(values);
  }

private:
  // ------------------------------------------------------------------------------ connection ----

  void connect() {
    ncclUniqueId id;
    if (rank() == 0)
      if (const ncclResult_t r = ncclGetUniqueId(&id); r != ncclSuccess) fail("ncclGetUniqueId", r);
    std::vector<std::byte> ids(sizeof id * static_cast<size_t>(size()));
    host_->all_gather(reinterpret_cast<const std::byte*>(&id), ids.data(), sizeof id);
    std::memcpy(&id, ids.data(), sizeof id); // rank 0's
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const std::lock_guard lock(mutex_);
    settle("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm_, size(), id, rank(), &config));
  }

  void close() {
    ncclResult_t state = ncclCommFinalize(comm_);
    for (const auto start = Clock::now(); state == ncclInProgress && Clock::now() - start < std::chrono::seconds(10); std::this_thread::sleep_for(kPause))
      if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess) break;
    if (state == ncclSuccess) ncclCommDestroy(comm_);
    else ncclCommAbort(comm_);
  }

  // Until a call on a communicator that does not block is under way. The mutex is held.
  void settle(const char* what, ncclResult_t result) {
    const auto start = Clock::now();
    while (result == ncclInProgress) {
      if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result); asked != ncclSuccess) result = asked;
      if (result != ncclInProgress) break;
      const double waited = std::chrono::duration<double>(Clock::now() - start).count();
      if (waited > options_.patience) {
        give_up(fmt::format("{}: no answer of the other ranks within {:.0f} s", what, options_.patience));
        throw_failure();
      }
      if (waited > 1e-3) std::this_thread::sleep_for(std::chrono::microseconds(100)); // until then it is about to be there
      else std::this_thread::yield();
    }
    if (result == ncclSuccess) return;
    give_up(fmt::format("{}: {}", what, ncclGetErrorString(result)));
    throw_failure();
  }

  template <class F> void call(const char* what, const F& function) { settle(what, function()); }

  // --------------------------------------------------------------------------------- failure ----

  void give_up(std::string why) { // the mutex is held
    if (!failure_.empty()) return;
    failure_ = std::move(why);
    if (comm_) ncclCommAbort(std::exchange(comm_, nullptr)); // ends its kernels
  }
  [[noreturn]] void throw_failure() const {
    throw Error(ErrorCode::Nccl, fmt::format("rank {} of {}: {}", rank(), size(), failure_), "a peer that ended says why in its own message");
  }
  void require_whole() {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure();
  }

  // Work that neither ends nor changes for too long, or an error that NCCL found meanwhile, ends the communicator.
  void watch(const std::stop_token& stop) {
    GDN_CUDA_NOTHROW(cudaSetDevice(device_));
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(kPause);
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock() || !comm_) continue;
      ncclResult_t state = ncclSuccess;
      if (ncclCommGetAsyncError(comm_, &state); state != ncclSuccess && state != ncclInProgress) {
        give_up(fmt::format("{}: {}", last_, ncclGetErrorString(state)));
      } else if (pending_ && cudaEventQuery(done_) != cudaErrorNotReady) {
        pending_ = false;
      } else if (pending_ && std::chrono::duration<double>(Clock::now() - since_).count() > options_.patience) {
        give_up(fmt::format("{}: no answer of the other ranks within {:.0f} s", last_, options_.patience));
      }
    }
  }

  // -------------------------------------------------------------------------------- exchanges ----

  // `work` on the own stream, behind what `compute` has got so far and before what it gets next.
  void ordered(const char* what, const std::function<void()>& work) {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure();
    last_ = what;
    GDN_CUDA(cudaEventRecord(ready_, options_.compute));
    GDN_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
    work();
    GDN_CUDA(cudaEventRecord(done_, stream_));
    GDN_CUDA(cudaStreamWaitEvent(options_.compute, done_, 0));
    pending_ = size() > 1;
    since_ = Clock::now();
  }

  void copy(const std::byte* from, std::byte* to, Bytes bytes) {
    if (from != to && bytes > 0) GDN_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_));
  }

  void exchange(std::span<const Part> to, std::span<const Part> from) {
    const auto me = static_cast<size_t>(rank());
    copy(to[me].data, from[me].data, to[me].bytes);
    if (size() == 1) return;
    auto check = [this](const char* what, ncclResult_t r) {
      if (r == ncclSuccess || r == ncclInProgress) return;
      give_up(fmt::format("{}: {}", what, ncclGetErrorString(r)));
      throw_failure();
    };
    check("ncclGroupStart", ncclGroupStart());
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      const Part &out = to[static_cast<size_t>(r)], &in = from[static_cast<size_t>(r)];
      if (out.bytes > 0) check("ncclSend", ncclSend(out.data, static_cast<size_t>(out.bytes), ncclUint8, r, comm_, stream_));
      if (in.bytes > 0) check("ncclRecv", ncclRecv(in.data, static_cast<size_t>(in.bytes), ncclUint8, r, comm_, stream_));
    }
    settle("ncclGroupEnd", ncclGroupEnd());
  }

  kernels::LaunchContext launch() const { return {.stream = stream_, .sm_count = options_.sm_count}; }

  std::unique_ptr<Communicator> host_;
  NcclOptions options_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
  std::byte* staging_ = nullptr;
  std::vector<std::byte> message_;
  // What the watchdog reads.
  std::mutex mutex_;
  std::string failure_, last_ = "connecting";
  bool pending_ = false;
  Clock::time_point since_;
  std::jthread watchdog_;
};

class NcclWorld final : public World {
public:
  NcclWorld(World& host, const NcclOptions& options) : host_(host), options_(options) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    return std::make_unique<NcclCommunicator>(host_.group(members), options_);
  }
  void abort(int status) override { host_.abort(status); }

private:
  World& host_;
  NcclOptions options_;
};

} // namespace

std::unique_ptr<World> start_nccl(World& host, const NcclOptions& options) { return std::make_unique<NcclWorld>(host, options); }

std::string nccl_version() {
  int v = 0;
  ncclGetVersion(&v);
  return fmt::format("{}.{}.{}", v / 10000, v % 10000 / 100, v % 100);
}

} // namespace gdn::trainer
