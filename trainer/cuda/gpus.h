#pragma once
#include <memory>

#include "trainer/comm/communicator.h"

struct CUstream_st;

// One GPU a rank.
namespace gdn::trainer::cuda {

// The GPU of this rank: that of its number among the ranks of its machine, as the launcher's environment has it; the
// only one, where the launcher shows each rank its own. Throws Error{NoDevice} when there are fewer GPUs than ranks.
int gpu_of_rank();

// The ranks of `host` exchanging memory of their current GPUs through NCCL (comm/nccl_world.h), in order with `compute`.
// Throws Error{NoDevice} when two ranks have the same GPU, Error{Config} when this build has no NCCL.
std::unique_ptr<World> connect_gpus(World& host, CUstream_st* compute, int sm_count);

} // namespace gdn::trainer::cuda
