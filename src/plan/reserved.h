#pragma once
#include <vector>

#include "model/library_buffers.h"
#include "model/static_state.h"
#include "plan/workload.h"
#include "program/allocator.h"
#include "program/schedule.h"

// What PyTorch's allocator reserves for a rank: the whole life of the process replayed into it.
namespace gdn::plan {

struct ReservedInput {
  std::vector<std::vector<PlacedUnit>> chunks;      // of the rank
  std::vector<program::Slot> slots;                 // of one step
  std::vector<model::StateBuffer> state;            // parameter and gradient buffers
  std::vector<model::LibraryBuffer> library;
  const config::Run* run = nullptr;
  Bytes frozen = 0;        // parameters outside the buffers
  std::int64_t shard = 0;  // which data-parallel rank: the tensors of its optimizer shard
  int delay = 0;           // ops after which a freed tensor is really free: work on other streams still uses it
};

// Peak reserved bytes: model construction, the contiguous parameter and gradient buffers, fp32 masters, one
// step, the optimizer states that the first update makes, a second step (Megatron-LM main d98e8a64,
// distributed_data_parallel and distrib_optimizer).
Bytes simulate_reserved(const ReservedInput& input, program::AllocatorOptions options);

} // namespace gdn::plan
