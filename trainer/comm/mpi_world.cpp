#include "trainer/comm/mpi_world.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/ordered_sum.h"

namespace gdn::trainer {

namespace {

constexpr Bytes kPiece = Bytes{1} << 30; // of one message: MPI counts are ints
constexpr Bytes kBlock = Bytes{1} << 20; // of an all-reduce
constexpr int kExchangeTag = 0;          // tags of `send` start after it

void check(int result, const char* what) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(ErrorCode::Mpi, fmt::format("{}: {}", what, std::string(text, static_cast<size_t>(length))));
}

// Seconds to wait for a peer before it counts as lost. A launcher that notices a dead rank is faster.
double patience() {
  const char* text = std::getenv("GDN_RANK_TIMEOUT");
  const double seconds = text ? std::atof(text) : 0;
  return seconds > 0 ? seconds : 600;
}

class MpiCommunicator final : public Communicator {
public:
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(std::byte* data, std::int64_t elements, DType dtype, Reduction reduction) override {
    const Bytes size = size_of(dtype);
    const std::int64_t block = std::max<std::int64_t>(1, kBlock / size);
    for (std::int64_t first = 0; first < elements; first += block) {
      const std::int64_t n = std::min(block, elements - first);
      gather(data + first * size, n * size);
      reduce_in_order(staging_.data(), size_, n, dtype, reduction, data + first * size);
    }
  }

  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) override {
    std::vector<Part> to(parts(), Part{const_cast<std::byte*>(mine), bytes}), from(parts());
    for (int r = 0; r < size_; ++r) from[static_cast<size_t>(r)] = {all + r * bytes, bytes};
    all_to_all(to, from);
  }

  void reduce_scatter(const std::byte* all, std::byte* mine, std::int64_t elements, DType dtype) override {
    const Bytes bytes = elements * size_of(dtype);
    staging_.resize(parts() * static_cast<size_t>(bytes));
    std::vector<Part> to(parts()), from(parts());
    for (int r = 0; r < size_; ++r) {
      to[static_cast<size_t>(r)] = {const_cast<std::byte*>(all) + r * bytes, bytes};
      from[static_cast<size_t>(r)] = {staging_.data() + r * bytes, bytes};
    }
    all_to_all(to, from);
    reduce_in_order(staging_.data(), size_, elements, dtype, Reduction::Sum, mine);
  }

  void all_to_all(std::span<const Part> to, std::span<const Part> from) override {
    std::vector<MPI_Request> requests;
    for (int step = 1; step < size_; ++step) {
      const auto r = static_cast<size_t>((rank_ - step + size_) % size_);
      for (Bytes at = 0; at < from[r].bytes; at += kPiece)
        check(MPI_Irecv(from[r].data + at, piece(from[r], at), MPI_BYTE, static_cast<int>(r), kExchangeTag, comm_, &requests.emplace_back()),
              "MPI_Irecv");
    }
    for (int step = 1; step < size_; ++step) {
      const auto r = static_cast<size_t>((rank_ + step) % size_);
      for (Bytes at = 0; at < to[r].bytes; at += kPiece)
        check(MPI_Isend(to[r].data + at, piece(to[r], at), MPI_BYTE, static_cast<int>(r), kExchangeTag, comm_, &requests.emplace_back()),
              "MPI_Isend");
    }
    const auto self = static_cast<size_t>(rank_);
    if (to[self].data != from[self].data && to[self].bytes > 0)
      std::memmove(from[self].data, to[self].data, static_cast<size_t>(to[self].bytes));
    wait(requests, "an exchange");
  }

  void send(int to, int tag, const std::byte* data, Bytes bytes) override {
    reap();
    Message& m = outgoing_.emplace_back();
    m.data.assign(data, data + bytes);
    for (Bytes at = 0; at == 0 || at < bytes; at += kPiece)
      check(MPI_Isend(m.data.data() + at, piece({m.data.data(), bytes}, at), MPI_BYTE, to, kExchangeTag + 1 + tag, comm_, &m.requests.emplace_back()),
            "MPI_Isend");
  }

  void receive(int from, int tag, std::byte* data, Bytes bytes) override {
    std::vector<MPI_Request> requests;
    for (Bytes at = 0; at == 0 || at < bytes; at += kPiece)
      check(MPI_Irecv(data + at, piece({data, bytes}, at), MPI_BYTE, from, kExchangeTag + 1 + tag, comm_, &requests.emplace_back()), "MPI_Irecv");
    wait(requests, fmt::format("a message of rank {} of the group", from));
  }

  void barrier() override {
    std::vector<MPI_Request> requests(1);
    check(MPI_Ibarrier(comm_, requests.data()), "MPI_Ibarrier");
    wait(requests, "a barrier");
  }

  void sum_on_host(std::span<double> values) override {
    all_reduce(reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), DType::FP64, Reduction::Sum);
  }

private:
  struct Message {
    std::vector<std::byte> data;
    std::vector<MPI_Request> requests;
  };

  size_t parts() const { return static_cast<size_t>(size_); }
  static int piece(const Part& p, Bytes at) { return static_cast<int>(std::min(kPiece, p.bytes - at)); }

  // `bytes` of every rank, into the staging memory.
  void gather(const std::byte* mine, Bytes bytes) {
    staging_.resize(parts() * static_cast<size_t>(bytes));
    all_gather(mine, staging_.data(), bytes);
  }

  // Asks, and sleeps in between: ranks that wait leave their core to those that compute.
  void wait(std::vector<MPI_Request>& requests, const std::string& what) {
    const auto start = std::chrono::steady_clock::now();
    for (int tries = 0;; ++tries) {
      int done = 0;
      check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done) return;
      reap();
      if (tries < 100) std::this_thread::yield();
      else std::this_thread::sleep_for(std::chrono::microseconds(tries < 1000 ? 50 : 500));
      const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (static const double limit = patience(); waited > limit)
        throw Error(ErrorCode::Mpi, fmt::format("waited {:.0f} s for {}: a rank is lost, or the ranks do not agree on what comes next", waited, what),
                    "GDN_RANK_TIMEOUT sets the limit in seconds");
    }
  }

  // Forgets what has been received.
  void reap() {
    while (!outgoing_.empty()) {
      Message& m = outgoing_.front();
      int done = 0;
      check(MPI_Testall(static_cast<int>(m.requests.size()), m.requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (!done) return;
      outgoing_.pop_front();
    }
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::vector<std::byte> staging_;  // of reductions
  std::deque<Message> outgoing_;
};

class MpiWorld final : public World {
public:
  MpiWorld() {
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0); // a collective of MPI's own that waits
    check(MPI_Init(nullptr, nullptr), "MPI_Init");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  ~MpiWorld() override { MPI_Finalize(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    MPI_Comm comm;
    check(MPI_Comm_split(MPI_COMM_WORLD, members.front(), rank_, &comm), "MPI_Comm_split");
    auto made = std::make_unique<MpiCommunicator>(comm);
    if (made->size() != static_cast<int>(members.size()))
      throw Error(ErrorCode::Internal, fmt::format("a group of {} ranks has {}", members.size(), made->size()));
    return made;
  }

  void abort(int status) override { MPI_Abort(MPI_COMM_WORLD, status); }

private:
  int rank_ = 0, size_ = 1;
};

} // namespace

std::unique_ptr<World> start_mpi() { return std::make_unique<MpiWorld>(); }

} // namespace gdn::trainer
