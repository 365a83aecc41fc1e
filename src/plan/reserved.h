#pragma once
#include <map>
#include <optional>
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
};

// What one traced unit asks of the allocator, pass by pass; equal layers share it.
struct AllocatorScript {
  enum class Do : char {
    Make,    // buffer `id` comes into being
    Scratch, // an allocation that goes when the op has ended
    Bind,    // attribute `id` of the unit refers to buffer `bytes`
    End,     // buffer `id` has no reader left
    OpDone
  };
  struct Line {
    Do what;
    int id = 0;
    Bytes bytes = 0;
  };
  std::vector<Line> forward = {}, backward = {};
  int attributes = 0;

  explicit AllocatorScript(const program::UnitTrace& trace);
};

class ReservedSimulation {
public:
  // `input` must outlive the simulation.
  ReservedSimulation(const ReservedInput& input, program::AllocatorOptions options);

  // Peak reserved bytes: model construction, the contiguous parameter and gradient buffers, fp32 masters, one
  // step, the optimizer states that the first update makes, a second step (Megatron-LM main d98e8a64,
  // distributed_data_parallel and distrib_optimizer). `shard`: which data-parallel rank, hence the tensors of
  // its optimizer shard. `delay`: ops after which a freed tensor is really free: work on other streams still
  // uses it.
  Bytes peak(std::int64_t shard, int delay);

private:
  const ReservedInput& input_;
  program::AllocatorOptions options_;
  std::map<const TracedUnit*, AllocatorScript> scripts_;
  std::int64_t built_shard_ = -1;
  std::optional<program::CachingAllocator> built_; // with parameters, gradients and masters of that shard
};

} // namespace gdn::plan
