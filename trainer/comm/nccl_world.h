#pragma once
#include <memory>
#include <string>

#include "core/units.h"
#include "trainer/comm/communicator.h"

struct CUstream_st;

namespace gdn::trainer {

struct NcclOptions {
  CUstream_st* compute = nullptr; // whose work exchanges come after, and which continues behind them
  int sm_count = 132;
  Seconds patience = 600;         // for a peer, before it counts as lost
};

// The ranks of `host`, one GPU each (the current device of the calling thread), exchanging device memory through NCCL.
// Ids, barriers and sums on the host go through `host`. Exchanges run on a stream of their own, in order with `compute`,
// and return at once; groups of the same ranks share one connection, made by connect() or the first exchange. Sums add up in the order of the ranks whatever
// NCCL's algorithms are: everyone sends everyone its piece, adds, and gives the sum back, which is the traffic of a ring.
// Messages between two ranks have one stream for even tags and one for odd ones (activations and gradients of a
// pipeline), and are received in the order they are sent: only even and odd ones overtake each other. A lost or silent
// peer aborts the communicator, so that the GPU's work ends; the next call throws Error{Nccl}, and so does the next barrier or
// sum on the host of any group: what comes behind those has nothing unfinished. `host` outlives the world, which outlives its
// groups.
std::unique_ptr<World> start_nccl(World& host, const NcclOptions& options);

std::string nccl_version(); // "2.28.3"

} // namespace gdn::trainer
