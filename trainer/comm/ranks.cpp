#include "trainer/comm/ranks.h"

#include <numeric>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

Ranks::Ranks(World& world, const config::Parallel& parallel)
    : topology_(parallel), rank_(world.rank()), place_(topology_.place(world.rank())) {
  if (parallel.gpus != world.size())
    throw Error(ErrorCode::Config, fmt::format("gpus: the run is for {} ranks (tp {}, cp {}, pp {}, ep {}, etp {}), but {}", parallel.gpus,
                                               parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp,
                                               world.size() == 1 ? "there is one rank" : fmt::format("{} were started", world.size())),
                fmt::format("start it with mpirun -n {0}, or srun -n {0}", parallel.gpus));
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g] = world.group(topology_.members(rank_, static_cast<model::Group>(g)));
  world_ = world.group(all);
  dense_replicas_ = world.group(topology_.dense_replicas(rank_));
  pipeline_ends_ = world.group(topology_.pipeline_ends(rank_));
}

std::int64_t Ranks::token_shards() const {
  return topology_.parallel().cp * (sequence_parallel() ? topology_.parallel().tp : 1);
}

} // namespace gdn::trainer
