#include "trainer/comm/nccl_world.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include <fmt/core.h>

#include "kernels/common/memory.h"
#include "kernels/common/ordered_sum.h"
#include "trainer/comm/nccl_connection.h"

namespace gdn::trainer {

namespace {

// All connections of this rank, of groups and of channels: a failed exchange leaves what its step computes unfinished, whoever
// made it.
class Connections {
public:
  explicit Connections(const NcclOptions& options) : options_(options) {}

  // Together, with one id. Every one that is alive is asked by require_whole.
  std::shared_ptr<Connection> open(int rank, int size, const ncclUniqueId& id) {
    auto made = std::make_shared<Connection>(rank, size, id, options_);
    std::erase_if(all_, [](const auto& c) { return c.expired(); });
    all_.push_back(made);
    return made;
  }

  // The one of `members`, which `host` connects; made and warm with the first call. Together.
  std::shared_ptr<Connection> of(const std::vector<int>& members, Communicator& host) {
    std::shared_ptr<Connection>& c = groups_[members];
    if (c) return c;
    ncclUniqueId id = {};
    if (host.rank() == 0 && host.size() > 1) id = new_nccl_id();
    std::vector<std::byte> ids(sizeof id * static_cast<size_t>(host.size()));
    host.all_gather(reinterpret_cast<const std::byte*>(&id), ids.data(), sizeof id);
    std::memcpy(&id, ids.data(), sizeof id); // rank 0's
    c = open(host.rank(), host.size(), id);
    if (host.size() > 1) c->warm_up();
    return c;
  }

  // When all that was queued so far is done: throws if an exchange of it has failed, whose part in it is not what it should be.
  void require_whole() const {
    GDN_CUDA(cudaStreamSynchronize(options_.compute));
    for (const std::weak_ptr<Connection>& c : all_)
      if (const auto alive = c.lock()) alive->require_whole();
  }

private:
  NcclOptions options_;
  std::map<std::vector<int>, std::shared_ptr<Connection>> groups_; // by their members
  std::vector<std::weak_ptr<Connection>> all_;
};

// Messages from one rank to another, in the order they are sent. What is sent is copied first: the sender goes on at
// once, and only when both copies are still on their way does its stream wait for the receiver.
class Channel {
public:
  // Together; `sends`: this rank is the one that sends, up to `largest` bytes. One message goes through: NCCL connects the pair with it.
  Channel(std::shared_ptr<Connection> connection, bool sends, Bytes largest) : with_(std::move(connection)) {
    for (Copy& c : copies_) GDN_CUDA(cudaEventCreateWithFlags(&c.sent, cudaEventDisableTiming));
    reserve(std::max(sends ? largest : 0, kFirst));
    std::byte* const data = copies_[0].data;
    with_->ordered("connecting", kFirst, untimed_, [&] { sends ? with_->send(data, kFirst, 1) : with_->receive(data, kFirst, 0); });
    with_->synchronise();
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel() {
    for (Copy& c : copies_) {
      GDN_CUDA_NOTHROW(cudaFree(c.data));
      GDN_CUDA_NOTHROW(cudaEventDestroy(c.sent));
    }
  }

  // Room for messages to send.
  void reserve(Bytes bytes) {
    for (Copy& c : copies_) {
      if (bytes <= c.bytes) continue;
      GDN_CUDA(cudaEventSynchronize(c.sent));
      GDN_CUDA(cudaFree(std::exchange(c.data, nullptr)));
      c.bytes = 0;
      c.data = kernels::allocate(bytes, "a copy of what a pipeline stage sends");
      c.bytes = bytes;
    }
  }

  void send(const std::byte* data, Bytes bytes, Stopwatch& watch) {
    reserve(bytes);
    Copy& c = copies_[next_++ % std::size(copies_)];
    GDN_CUDA(cudaStreamWaitEvent(with_->compute(), c.sent, 0));
    GDN_CUDA(cudaMemcpyAsync(c.data, data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, with_->compute()));
    with_->ordered("p2p", bytes, watch, [&] { with_->send(c.data, bytes, 1); }, false);
    GDN_CUDA(cudaEventRecord(c.sent, with_->stream()));
  }
  void receive(std::byte* data, Bytes bytes) {
    with_->ordered("p2p", bytes, untimed_, [&] { with_->receive(data, bytes, 0); });
  }

private:
  static constexpr Bytes kFirst = 256;
  struct Copy {
    std::byte* data = nullptr;
    Bytes bytes = 0;
    cudaEvent_t sent = nullptr;
  };
  std::shared_ptr<Connection> with_;
  Copy copies_[2];
  size_t next_ = 0;
  Stopwatch untimed_; // the sender's counts
};

class NcclCommunicator final : public Communicator {
public:
  NcclCommunicator(std::unique_ptr<Communicator> host, std::vector<int> members, Connections& connections, Stopwatch& watch)
      : host_(std::move(host)), members_(std::move(members)), connections_(connections), watch_(watch) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void connect() override {
    if (!with_) with_ = connections_.of(members_, *host_);
  }
  void connect_send(int to, int tag, Bytes largest) override { channel(to, tag, true, largest).reserve(largest); }
  void connect_receive(int from, int tag) override { channel(from, tag, false, 0); }

  void all_reduce(std::byte* data, std::int64_t elements, DType dtype, Reduction reduction) override {
    if (size() == 1) return;
    connect();
    const Bytes element = size_of(dtype);
    const std::int64_t ranks = size(), block = Connection::piece_of(element, ranks) * ranks;
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
          from.push_back(r == rank() ? mine : Part{with_->staging() + r * mine.bytes, mine.bytes}); // what is here stays
        }
        with_->exchange(all, from);
        kernels::reduce_in_order({with_->staging(), size(), mine.bytes / element, rank(), mine.data}, dtype, reduction == Reduction::Max, mine.data,
                                 with_->launch());
        with_->exchange(to, all);
      }
    });
  }

  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) override {
    connect();
    with_->ordered("all_gather", bytes * size(), watch_, [&] {
      if (size() == 1) with_->copy(mine, all, bytes);
      else with_->all_gather(mine, all, bytes);
    });
  }

  void reduce_scatter(const std::byte* all, std::byte* mine, std::int64_t elements, DType dtype) override {
    connect();
    const Bytes element = size_of(dtype);
    const std::int64_t block = Connection::piece_of(element, size());
    with_->ordered("reduce_scatter", elements * element * size(), watch_, [&] {
      if (size() == 1) return with_->copy(all, mine, elements * element);
      for (std::int64_t first = 0; first < elements; first += block) {
        const Bytes bytes = std::min(block, elements - first) * element;
        std::vector<Part> to, from;
        for (int r = 0; r < size(); ++r) {
          to.push_back({const_cast<std::byte*>(all) + (r * elements + first) * element, bytes});
          from.push_back(r == rank() ? to.back() : Part{with_->staging() + r * bytes, bytes}); // what is here stays
        }
        with_->exchange(to, from);
        kernels::reduce_in_order({with_->staging(), size(), bytes / element, rank(), to[static_cast<size_t>(rank())].data}, dtype, false, mine + first * element,
                                 with_->launch());
      }
    });
  }

  void all_to_all(std::span<const Part> to, std::span<const Part> from) override {
    connect();
    Bytes sent = 0;
    for (const Part& p : to) sent += p.bytes;
    with_->ordered("all_to_all", sent, watch_, [&] { with_->exchange(to, from); });
  }

  void send(int to, int tag, const std::byte* data, Bytes bytes) override { channel(to, tag, true, bytes).send(data, bytes, watch_); }
  void receive(int from, int tag, std::byte* data, Bytes bytes) override { channel(from, tag, false, 0).receive(data, bytes); }
  void barrier() override {
    connections_.require_whole();
    host_->barrier();
  }
  void sum_on_host(std::span<double> values) override {
    connections_.require_whole();
    host_->sum_on_host(values);
  }

private:
  // Made when first asked for: both ends wait for each other there.
  Channel& channel(int peer, int tag, bool sends, Bytes largest) {
    std::unique_ptr<Channel>& c = channels_[{peer, tag % 2, sends == (rank() < peer)}];
    if (c) return *c;
    ncclUniqueId id;
    if (sends) {
      id = new_nccl_id();
      host_->send(peer, tag % 2, reinterpret_cast<const std::byte*>(&id), sizeof id);
    } else {
      host_->receive(peer, tag % 2, reinterpret_cast<std::byte*>(&id), sizeof id);
    }
    c = std::make_unique<Channel>(connections_.open(sends ? 0 : 1, 2, id), sends, largest);
    return *c;
  }

  std::unique_ptr<Communicator> host_;
  std::vector<int> members_;
  Connections& connections_;
  std::shared_ptr<Connection> with_; // null until it is needed
  Stopwatch& watch_;
  // Closing one waits for its other end: both ranks close theirs in this order, and none waits in a circle.
  std::map<std::tuple<int, int, bool>, std::unique_ptr<Channel>> channels_; // by peer, parity of the tag, whether towards the higher rank
};

class NcclWorld final : public World {
public:
  NcclWorld(World& host, const NcclOptions& options) : host_(host), connections_(options) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    return std::make_unique<NcclCommunicator>(host_.group(members), members, connections_, watch_);
  }
  void abort(int status) override { host_.abort(status); }
  void time_exchanges() override { watch_.start(); }
  std::vector<TimedExchange> timed_exchanges() override { return watch_.stop(); }

private:
  World& host_;
  Stopwatch watch_;
  Connections connections_;
};

} // namespace

std::unique_ptr<World> start_nccl(World& host, const NcclOptions& options) { return std::make_unique<NcclWorld>(host, options); }

std::string nccl_version() {
  int v = 0;
  ncclGetVersion(&v);
  return fmt::format("{}.{}.{}", v / 10000, v % 10000 / 100, v % 100);
}

} // namespace gdn::trainer
