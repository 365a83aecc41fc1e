#pragma once
#include <array>
#include <memory>

#include "trainer/comm/communicator.h"
#include "trainer/comm/topology.h"

namespace gdn::trainer {

// One rank of a run: where it stands, and its communicators. Op lists name groups; here they are.
class Ranks {
public:
  // Every rank of the world makes one at the same time. Throws Error{Config} when the run is for another
  // number of ranks than the world has.
  Ranks(World& world, const config::Parallel& parallel);

  const Topology& topology() const { return topology_; }
  const Place& place() const { return place_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return topology_.size(); }
  bool alone() const { return size() == 1; }

  Communicator& group(model::Group kind) const { return *groups_[static_cast<size_t>(kind)]; }
  Communicator& world() const { return *world_; }
  Communicator& dense_replicas() const { return *dense_replicas_; }
  Communicator& pipeline_ends() const { return *pipeline_ends_; }

  // Ranks that share the tokens of one micro-batch: those of a sequence-parallel and a context group.
  std::int64_t token_shards() const;
  bool sequence_parallel() const { return topology_.parallel().sequence_parallel && topology_.parallel().tp > 1; }

private:
  Topology topology_;
  std::int64_t rank_;
  Place place_;
  std::array<std::unique_ptr<Communicator>, static_cast<size_t>(model::Group::Pp) + 1> groups_;
  std::unique_ptr<Communicator> world_, dense_replicas_, pipeline_ends_;
};

} // namespace gdn::trainer
