#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/units.h"

// Exchanges between the ranks of a group. Memory is that of the device whose ops use it: the host for
// MPI and for a rank alone. Element types and bytes are explicit; nothing else is known of the contents.
namespace gdn::trainer {

enum class Reduction { Sum, Max };

// A stretch of memory for or from one rank of the group.
struct Part {
  std::byte* data = nullptr;
  Bytes bytes = 0;
};

// Every member of a group calls the same functions in the same order with the same sizes (all_to_all:
// what one sends is what the other receives). Sums run in the order of the ranks, in fp32 for 16-bit
// types, and are rounded once: the result is the same on every rank and in every run. Throws
// Error{Mpi} when a peer is lost or does not answer.
class Communicator {
public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0; // in the group
  virtual int size() const = 0;

  // Sets up what exchanges of the group go through and gives it the memory it takes on the device, so that a plan counts only on
  // what is left. Together; without it the first exchange does that.
  virtual void connect() {}
  // The same for messages of up to `largest` bytes from this rank to another and from another to this one, by both ends.
  virtual void connect_send(int /*to*/, int /*tag*/, Bytes /*largest*/) {}
  virtual void connect_receive(int /*from*/, int /*tag*/) {}

  // In place.
  virtual void all_reduce(std::byte* data, std::int64_t elements, DType dtype, Reduction reduction = Reduction::Sum) = 0;
  // `bytes` of every rank, in their order, into `all`; `mine` may lie at its place there.
  virtual void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) = 0;
  // The sum over all ranks of elements [rank * elements, ...) of `all`; `mine` may lie at its place there.
  virtual void reduce_scatter(const std::byte* all, std::byte* mine, std::int64_t elements, DType dtype) = 0;
  // to[r] goes to rank r, from[r] comes from it. Parts to send may overlap.
  virtual void all_to_all(std::span<const Part> to, std::span<const Part> from) = 0;

  // Point to point. `send` returns when `data` may be used again, whether or not the peer asks for it yet;
  // messages of one tag between two ranks keep their order.
  virtual void send(int to, int tag, const std::byte* data, Bytes bytes) = 0;
  virtual void receive(int from, int tag, std::byte* data, Bytes bytes) = 0;

  // Behind both, everything that was exchanged before is whole, in any group and on every rank of this one: else they throw.
  virtual void barrier() = 0;
  // Sums of a few values in host memory, in the order of the ranks.
  virtual void sum_on_host(std::span<double> values) = 0;
};

// One exchange and how long it took, waiting for the other ranks included. Bytes as model::Collective counts them.
struct TimedExchange {
  std::string kind; // "all_to_all", ... as in hardware profiles
  int ranks = 1;
  Bytes bytes = 0;
  Seconds seconds = 0;
};

// All ranks of a run, and how groups of them are formed.
class World {
public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The group of `members` (world ranks in ascending order, this one among them). Every rank of the world
  // calls it at the same time, each with the group it belongs to. The world outlives its groups.
  virtual std::unique_ptr<Communicator> group(const std::vector<int>& members) = 0;
  // Times exchanges from here on, where a world can (NCCL's, by the GPU's clock). timed_exchanges ends it, and waits for them.
  virtual void time_exchanges() {}
  virtual std::vector<TimedExchange> timed_exchanges() { return {}; }
  // Ends every rank with `status` as exit status. Returns only where there is nobody to end.
  virtual void abort(int status) = 0;
};

// A world of one: exchanges copy, or do nothing.
class Alone final : public World {
public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override;
  void abort(int) override {}
};

// The ranks that mpirun or srun started; a world of one without a launcher. Throws Error{Config} when a
// launcher started several ranks and this build has no MPI.
std::unique_ptr<World> start_world();
// How many ranks a launcher started, from its environment; 1 without one.
int launched_ranks();

} // namespace gdn::trainer
