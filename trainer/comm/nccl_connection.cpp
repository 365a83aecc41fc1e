#include "trainer/comm/nccl_connection.h"

#include <exception>
#include <utility>

#include <fmt/format.h>

#include "kernels/common/memory.h"

namespace gdn::trainer {

namespace {

constexpr auto kPause = std::chrono::milliseconds(20);
constexpr Bytes kSmall = 256; // of an exchange that only connects
constexpr const char* kPeer = "a peer that ended says why in its own message";

} // namespace

ncclUniqueId new_nccl_id() {
  ncclUniqueId id;
  if (const ncclResult_t r = ncclGetUniqueId(&id); r != ncclSuccess)
    throw Error(ErrorCode::Nccl, fmt::format("ncclGetUniqueId: {}", ncclGetErrorString(r)), "NCCL_DEBUG=INFO says more");
  return id;
}

Connection::Connection(int rank, int size, const ncclUniqueId& id, const NcclOptions& options) : rank_(rank), size_(size), options_(options) {
  GDN_CUDA(cudaGetDevice(&device_));
  GDN_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (cudaEvent_t* e : {&ready_, &done_}) GDN_CUDA(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
  if (size_ == 1) return;
  connect(id);
  watchdog_ = std::jthread([this](std::stop_token stop) { watch(stop); });
}

Connection::~Connection() {
  if (watchdog_.joinable()) {
    watchdog_.request_stop();
    watchdog_.join();
  }
  if (comm_ && std::uncaught_exceptions() > 0) ncclCommAbort(comm_); // nobody waits for the others' farewell
  else if (comm_ && !failure_) close();
  GDN_CUDA_NOTHROW(cudaFree(staging_));
  GDN_CUDA_NOTHROW(cudaEventDestroy(ready_));
  GDN_CUDA_NOTHROW(cudaEventDestroy(done_));
  GDN_CUDA_NOTHROW(cudaStreamDestroy(stream_));
}

// Rings carry large all-gathers otherwise than small ones; messages of a pair go one way whatever their size.
void Connection::warm_up() {
  staging_ = kernels::allocate(kStaging, fmt::format("sums over a group of {} ranks", size_));
  Stopwatch untimed;
  ordered("connecting", kSmall, untimed, [&] {
    for (const Bytes bytes : {kSmall, piece_of(1, size_)}) all_gather(staging_ + rank_ * bytes, staging_, bytes);
    std::vector<Part> to, from;
    for (int r = 0; r < size_; ++r) {
      to.push_back({staging_ + rank_ * kSmall, kSmall});
      from.push_back({staging_ + r * kSmall, kSmall});
    }
    exchange(to, from);
  });
  synchronise();
}

void Connection::require_whole() {
  const std::lock_guard lock(mutex_);
  ask_nccl();
  require_whole_locked();
}

void Connection::synchronise() {
  GDN_CUDA(cudaStreamSynchronize(stream_));
  require_whole();
}

void Connection::ordered(const char* what, Bytes bytes, Stopwatch& watch, const std::function<void()>& work, bool waits) {
  const std::lock_guard lock(mutex_);
  require_whole_locked();
  last_ = what;
  GDN_CUDA(cudaEventRecord(ready_, options_.compute));
  GDN_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
  watch.around({what, size_, bytes, 0}, stream_, work);
  GDN_CUDA(cudaEventRecord(done_, stream_));
  if (waits) GDN_CUDA(cudaStreamWaitEvent(options_.compute, done_, 0));
  pending_ = size_ > 1;
  since_ = Clock::now();
}

void Connection::copy(const std::byte* from, std::byte* to, Bytes bytes) {
  if (from != to && bytes > 0) GDN_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_));
}

void Connection::all_gather(const std::byte* mine, std::byte* all, Bytes bytes) {
  settle("ncclAllGather", ncclAllGather(mine, all, static_cast<size_t>(bytes), ncclUint8, comm_, stream_));
}

void Connection::send(const std::byte* data, Bytes bytes, int to) {
  settle("ncclSend", ncclSend(data, static_cast<size_t>(bytes), ncclUint8, to, comm_, stream_));
}

void Connection::receive(std::byte* data, Bytes bytes, int from) {
  settle("ncclRecv", ncclRecv(data, static_cast<size_t>(bytes), ncclUint8, from, comm_, stream_));
}

void Connection::exchange(std::span<const Part> to, std::span<const Part> from) {
  const auto me = static_cast<size_t>(rank_);
  copy(to[me].data, from[me].data, to[me].bytes);
  if (size_ == 1) return;
  auto check = [this](const char* what, ncclResult_t r) {
    if (r == ncclSuccess || r == ncclInProgress) return;
    give_up_after(what, r);
    require_whole_locked();
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

void Connection::connect(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::lock_guard lock(mutex_);
  settle("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
}

void Connection::close() {
  ncclResult_t state = ncclCommFinalize(comm_);
  for (const auto start = Clock::now(); state == ncclInProgress && Clock::now() - start < std::chrono::seconds(10); std::this_thread::sleep_for(kPause))
    if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess) break;
  if (state == ncclSuccess) ncclCommDestroy(comm_);
  else ncclCommAbort(comm_);
}

void Connection::settle(const char* what, ncclResult_t result) {
  const auto start = Clock::now();
  while (result == ncclInProgress) {
    if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result); asked != ncclSuccess) result = asked;
    if (result != ncclInProgress) break;
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited > options_.patience) {
      give_up_waiting(what);
      require_whole_locked();
    }
    if (waited > 1e-3) std::this_thread::sleep_for(std::chrono::microseconds(100)); // until then it is about to be there
    else std::this_thread::yield();
  }
  if (result == ncclSuccess) return;
  give_up_after(what, result);
  require_whole_locked();
}

void Connection::give_up(Error why) {
  if (failure_) return;
  failure_ = std::move(why);
  if (comm_) ncclCommAbort(std::exchange(comm_, nullptr));
}

void Connection::give_up_waiting(const std::string& what) {
  give_up({ErrorCode::Nccl, fmt::format("rank {} of {}: {}: no answer of the other ranks within {:.0f} s", rank_, size_, what, options_.patience), kPeer});
}

void Connection::give_up_after(const std::string& what, ncclResult_t result) {
  const std::string last = ncclGetLastError(comm_); // the one place where it says that memory ran out
  const std::string text = fmt::format("rank {} of {}: {}: {}{}", rank_, size_, what, ncclGetErrorString(result),
                                       last.empty() ? "" : fmt::format(" (NCCL's last warning: {})", last));
  auto says = [&](const char* words) { return last.find(words) != std::string::npos; };
  if (result != ncclUnhandledCudaError || !(says("out of memory") || says("Failed to CUDA malloc") || says("Failed to CUDA calloc"))) return give_up({ErrorCode::Nccl, text, kPeer});
  give_up({ErrorCode::DoesNotFit, text, "the GPU has no room for NCCL's buffers: end what else runs on it, take fewer kinds of parallelism or a smaller model, "
                                        "or smaller buffers (NCCL_BUFFSIZE, NCCL_MAX_CTAS)"});
}

void Connection::ask_nccl() {
  if (!comm_) return;
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(comm_, &state); state != ncclSuccess && state != ncclInProgress) give_up_after(last_, state);
}

void Connection::require_whole_locked() const {
  if (failure_) throw Error(*failure_);
}

void Connection::watch(const std::stop_token& stop) {
  GDN_CUDA_NOTHROW(cudaSetDevice(device_));
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(kPause);
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || !comm_) continue;
    ask_nccl();
    if (pending_ && cudaEventQuery(done_) != cudaErrorNotReady) pending_ = false;
    else if (pending_ && std::chrono::duration<double>(Clock::now() - since_).count() > options_.patience) give_up_waiting(last_);
  }
}

} // namespace gdn::trainer
