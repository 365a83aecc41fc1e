#include "trainer/comm/nccl_world.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <exception>
#include <thread>
#include <tuple>
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

[[noreturn]] void fail(const std::string& what, ncclResult_t result) {
  throw Error(ErrorCode::Nccl, fmt::format("{}: {}", what, ncclGetErrorString(result)), "NCCL_DEBUG=INFO says more");
}

ncclUniqueId new_id() {
  ncclUniqueId id;
  if (const ncclResult_t r = ncclGetUniqueId(&id); r != ncclSuccess) fail("ncclGetUniqueId", r);
  return id;
}

// What some ranks have together: NCCL's communicator, its stream, and who watches it.
class Connection {
public:
  // Together, with one id.
  Connection(int rank, int size, const ncclUniqueId& id, const NcclOptions& options) : rank_(rank), size_(size), options_(options) {
    GDN_CUDA(cudaGetDevice(&device_));
    GDN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* e : {&ready_, &done_}) GDN_CUDA(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    if (size_ == 1) return;
    connect(id);
    watchdog_ = std::jthread([this](std::stop_token stop) { watch(stop); });
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    if (watchdog_.joinable()) {
      watchdog_.request_stop();
      watchdog_.join();
    }
    if (comm_ && std::uncaught_exceptions() > 0) ncclCommAbort(comm_); // nobody waits for the others' farewell
    else if (comm_ && failure_.empty()) close();
    GDN_CUDA_NOTHROW(cudaFree(staging_));
    GDN_CUDA_NOTHROW(cudaEventDestroy(ready_));
    GDN_CUDA_NOTHROW(cudaEventDestroy(done_));
    GDN_CUDA_NOTHROW(cudaStreamDestroy(stream_));
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Memory for sums, kStaging bytes.
  void reserve_staging() {
    void* staging = nullptr;
    GDN_CUDA(cudaMalloc(&staging, static_cast<size_t>(kStaging)));
    staging_ = static_cast<std::byte*>(staging);
  }
  std::byte* staging() const { return staging_; }
  cudaStream_t stream() const { return stream_; }
  kernels::LaunchContext launch() const { return {.stream = stream_, .sm_count = options_.sm_count}; }
  CUstream_st* compute() const { return options_.compute; }

  void require_whole() {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure();
  }
  void synchronise() {
    GDN_CUDA(cudaStreamSynchronize(stream_));
    require_whole();
  }

  // `work` on the own stream, behind what `compute` has got so far and, if it `waits`, before what it gets next.
  void ordered(const char* what, Bytes bytes, Stopwatch& watch, const std::function<void()>& work, bool waits = true) {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure();
    last_ = what;
    GDN_CUDA(cudaEventRecord(ready_, options_.compute));
    GDN_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
    watch.around({what, size_, bytes, 0}, stream_, work);
    GDN_CUDA(cudaEventRecord(done_, stream_));
    if (waits) GDN_CUDA(cudaStreamWaitEvent(options_.compute, done_, 0));
    pending_ = size_ > 1;
    since_ = Clock::now();
  }

  // Inside ordered().
  void copy(const std::byte* from, std::byte* to, Bytes bytes) {
    if (from != to && bytes > 0) GDN_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_));
  }
  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) {
    settle("ncclAllGather", ncclAllGather(mine, all, static_cast<size_t>(bytes), ncclUint8, comm_, stream_));
  }
  void send(const std::byte* data, Bytes bytes, int to) {
    settle("ncclSend", ncclSend(data, static_cast<size_t>(bytes), ncclUint8, to, comm_, stream_));
  }
  void receive(std::byte* data, Bytes bytes, int from) {
    settle("ncclRecv", ncclRecv(data, static_cast<size_t>(bytes), ncclUint8, from, comm_, stream_));
  }
  void exchange(std::span<const Part> to, std::span<const Part> from) {
    const auto me = static_cast<size_t>(rank_);
    copy(to[me].data, from[me].data, to[me].bytes);
    if (size_ == 1) return;
    auto check = [this](const char* what, ncclResult_t r) {
      if (r == ncclSuccess || r == ncclInProgress) return;
      give_up(fmt::format("{}: {}", what, ncclGetErrorString(r)));
      throw_failure();
    };
    check("ncclGroupStart", ncclGroupStart());
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Part &out = to[static_cast<size_t>(r)], &in = from[static_cast<size_t>(r)];
      if (out.bytes > 0) check("ncclSend", ncclSend(out.data, static_cast<size_t>(out.bytes), ncclUint8, r, comm_, stream_));
      if (in.bytes > 0) check("ncclRecv", ncclRecv(in.data, static_cast<size_t>(in.bytes), ncclUint8, r, comm_, stream_));
    }
    settle("ncclGroupEnd", ncclGroupEnd());
  }

private:
  void connect(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const std::lock_guard lock(mutex_);
    settle("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
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

  void give_up(std::string why) { // the mutex is held
    if (!failure_.empty()) return;
    failure_ = std::move(why);
    if (comm_) ncclCommAbort(std::exchange(comm_, nullptr)); // ends its kernels
  }
  [[noreturn]] void throw_failure() const {
    throw Error(ErrorCode::Nccl, fmt::format("rank {} of {}: {}", rank_, size_, failure_), "a peer that ended says why in its own message");
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

  int rank_, size_;
  NcclOptions options_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
  std::byte* staging_ = nullptr;
  // What the watchdog reads.
  std::mutex mutex_;
  std::string failure_, last_ = "connecting";
  bool pending_ = false;
  Clock::time_point since_;
  std::jthread watchdog_;
};

// Messages from one rank to another, in the order they are sent. What is sent is copied first: the sender goes on at
// once, and only when both copies are still on their way does its stream wait for the receiver.
class Channel {
public:
  // Together; `sends`: this rank is the one that sends.
  Channel(const ncclUniqueId& id, bool sends, const NcclOptions& options) : with_(sends ? 0 : 1, 2, id, options) {
    for (Copy& c : copies_) GDN_CUDA(cudaEventCreateWithFlags(&c.sent, cudaEventDisableTiming));
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel() {
    for (Copy& c : copies_) {
      GDN_CUDA_NOTHROW(cudaFree(c.data));
      GDN_CUDA_NOTHROW(cudaEventDestroy(c.sent));
    }
  }

  void send(const std::byte* data, Bytes bytes, Stopwatch& watch) {
    Copy& c = copies_[next_++ % std::size(copies_)];
    if (bytes > c.bytes) {
      GDN_CUDA(cudaEventSynchronize(c.sent));
      GDN_CUDA(cudaFree(std::exchange(c.data, nullptr)));
      GDN_CUDA(cudaMalloc(&c.data, static_cast<size_t>(bytes)));
      c.bytes = bytes;
    }
    GDN_CUDA(cudaStreamWaitEvent(with_.compute(), c.sent, 0));
    GDN_CUDA(cudaMemcpyAsync(c.data, data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, with_.compute()));
    with_.ordered("p2p", bytes, watch, [&] { with_.send(static_cast<const std::byte*>(c.data), bytes, 1); }, false);
    GDN_CUDA(cudaEventRecord(c.sent, with_.stream()));
  }
  void receive(std::byte* data, Bytes bytes) {
    with_.ordered("p2p", bytes, untimed_, [&] { with_.receive(data, bytes, 0); });
  }

private:
  struct Copy {
    void* data = nullptr;
    Bytes bytes = 0;
    cudaEvent_t sent = nullptr;
  };
  Connection with_;
  Copy copies_[2];
  size_t next_ = 0;
  Stopwatch untimed_; // the sender's counts
};

class NcclCommunicator final : public Communicator {
public:
  NcclCommunicator(std::unique_ptr<Communicator> host, std::shared_ptr<Connection> connection, const NcclOptions& options, Stopwatch& watch)
      : host_(std::move(host)), with_(std::move(connection)), options_(options), watch_(watch) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void all_reduce(std::byte* data, std::int64_t elements, DType dtype, Reduction reduction) override {
    if (size() == 1) return;
    const Bytes element = size_of(dtype);
    const std::int64_t ranks = size(), block = kStaging / element / 256 * 256; // the pieces of all ranks fill the staging memory
    with_->ordered("all_reduce", elements * element, watch_, [&] {
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
          from.push_back({with_->staging() + r * mine.bytes, mine.bytes});
        }
        with_->exchange(all, from);
        kernels::reduce_in_order(with_->staging(), size(), mine.bytes / element, dtype, reduction == Reduction::Max, mine.data, with_->launch());
        with_->exchange(to, all);
      }
    });
  }

  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) override {
    with_->ordered("all_gather", bytes * size(), watch_, [&] {
      if (size() == 1) with_->copy(mine, all, bytes);
      else with_->all_gather(mine, all, bytes);
    });
  }

  void reduce_scatter(const std::byte* all, std::byte* mine, std::int64_t elements, DType dtype) override {
    const Bytes element = size_of(dtype);
    const std::int64_t block = kStaging / element / size() / 256 * 256;
    with_->ordered("reduce_scatter", elements * element * size(), watch_, [&] {
      if (size() == 1) return with_->copy(all, mine, elements * element);
      for (std::int64_t first = 0; first < elements; first += block) {
        const Bytes bytes = std::min(block, elements - first) * element;
        std::vector<Part> to, from;
        for (int r = 0; r < size(); ++r) {
          to.push_back({const_cast<std::byte*>(all) + (r * elements + first) * element, bytes});
          from.push_back({with_->staging() + r * bytes, bytes});
        }
        with_->exchange(to, from);
        kernels::reduce_in_order(with_->staging(), size(), bytes / element, dtype, false, mine + first * element, with_->launch());
      }
    });
  }

  void all_to_all(std::span<const Part> to, std::span<const Part> from) override {
    Bytes sent = 0;
    for (const Part& p : to) sent += p.bytes;
    with_->ordered("all_to_all", sent, watch_, [&] { with_->exchange(to, from); });
  }

  void send(int to, int tag, const std::byte* data, Bytes bytes) override { channel(to, tag, true).send(data, bytes, watch_); }
  void receive(int from, int tag, std::byte* data, Bytes bytes) override { channel(from, tag, false).receive(data, bytes); }
  void barrier() override {
    with_->synchronise();
    host_->barrier();
  }
  void sum_on_host(std::span<double> values) override {
    with_->require_whole();
    host_->sum_on_host(values);
  }

private:
  // Made with the first message: the sender waits until the receiver asks for it.
  Channel& channel(int peer, int tag, bool sends) {
    std::unique_ptr<Channel>& c = channels_[{peer, tag % 2, sends}];
    if (c) return *c;
    ncclUniqueId id;
    if (sends) {
      id = new_id();
      host_->send(peer, tag % 2, reinterpret_cast<const std::byte*>(&id), sizeof id);
    } else {
      host_->receive(peer, tag % 2, reinterpret_cast<std::byte*>(&id), sizeof id);
    }
    c = std::make_unique<Channel>(id, sends, options_);
    return *c;
  }

  std::unique_ptr<Communicator> host_;
  std::shared_ptr<Connection> with_;
  NcclOptions options_;
  Stopwatch& watch_;
  std::map<std::tuple<int, int, bool>, std::unique_ptr<Channel>> channels_; // by peer, parity of the tag, direction
};

class NcclWorld final : public World {
public:
  NcclWorld(World& host, const NcclOptions& options) : host_(host), options_(options) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    std::unique_ptr<Communicator> host = host_.group(members);
    std::shared_ptr<Connection>& connection = connections_[members];
    if (!connection) {
      ncclUniqueId id = {};
      if (host->rank() == 0 && host->size() > 1) id = new_id();
      std::vector<std::byte> ids(sizeof id * static_cast<size_t>(host->size()));
      host->all_gather(reinterpret_cast<const std::byte*>(&id), ids.data(), sizeof id);
      std::memcpy(&id, ids.data(), sizeof id); // rank 0's
      connection = std::make_shared<Connection>(host->rank(), host->size(), id, options_);
      if (host->size() > 1) connection->reserve_staging();
    }
    return std::make_unique<NcclCommunicator>(std::move(host), connection, options_, watch_);
  }
  void abort(int status) override { host_.abort(status); }
  void time_exchanges() override { watch_.start(); }
  std::vector<TimedExchange> timed_exchanges() override { return watch_.stop(); }

private:
  World& host_;
  NcclOptions options_;
  Stopwatch watch_;
  std::map<std::vector<int>, std::shared_ptr<Connection>> connections_; // by their members
};

} // namespace

std::unique_ptr<World> start_nccl(World& host, const NcclOptions& options) { return std::make_unique<NcclWorld>(host, options); }

std::string nccl_version() {
  int v = 0;
  ncclGetVersion(&v);
  return fmt::format("{}.{}.{}", v / 10000, v % 10000 / 100, v % 100);
}

} // namespace gdn::trainer
