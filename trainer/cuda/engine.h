#pragma once
#include <unordered_map>
#include <vector>

#include "kernels/gdn/shape.h"
#include "kernels/gemm/gemm.h"
#include "trainer/op_call.h"

// What the CUDA functions of the ops share: the stream, the step's data in device memory, and where a step's totals
// are collected.
namespace gdn::trainer::cuda {

// A micro-batch in device memory.
struct DeviceBatch {
  const std::int64_t *ids = nullptr, *labels = nullptr; // [tokens]
  const std::int32_t* positions = nullptr;              // [tokens], in their sequences
  kernels::GdnChunkTable table = {};                    // tiles of 64 tokens of every sequence
  std::int64_t tokens = 0, sequences = 0;
  // The tokens that this rank holds under context parallelism, else all of them.
  std::int64_t local = 0;
  const std::int32_t* local_tokens = nullptr;           // [local], in the micro-batch; null: all
  const std::int32_t* local_positions = nullptr;        // [local], in their sequences; decoding: in their requests
  // Decoding, else null: the slots of the sequences' requests, by sequence and by token.
  const std::int32_t *slots = nullptr, *token_slots = nullptr;
  const std::int32_t* cu_tokens = nullptr;              // [sequences + 1], offsets of the sequences
};

// Sums of a step, as StepTotals.
struct DeviceTotals {
  double* sums = nullptr;        // [3]: loss, multi-token losses, auxiliary losses
  std::int64_t* load = nullptr;  // [kMaxExperts]
  static constexpr int kLoss = 0, kMtp = 1, kAux = 2, kSums = 3;
};

class Engine {
public:
  CUstream_st* stream = nullptr;
  int sm_count = 0;
  kernels::Gemm gemm;
  std::vector<DeviceBatch> batches;
  DeviceTotals totals;
  int experts_seen = 0;          // of the routers that ran in this step

  const DeviceBatch& batch(const OpCall& c) const { return batches[static_cast<size_t>(c.micro_batch())]; }
  // A launch without scratch, and one with all the scratch that the op declares.
  kernels::LaunchContext launch() const { return {stream, sm_count, nullptr, 0}; }
  kernels::LaunchContext launch(const OpCall& c) const;

  // Rows per expert that stack megatron keeps outside its tensors, [experts + 1] offsets, by op and micro-batch (where
  // its host table lies): a pool of slots, each rewritten by every run of its op, the oldest given away again.
  std::int32_t* table(const OpCall& c, int op);
  static constexpr std::int64_t kTables = 4096, kTableSize = 1025;
  std::int32_t* tables = nullptr;

private:
  std::unordered_map<const void*, std::int64_t> slots_;
  std::int64_t slots_given_ = 0;
};

// Scratch of a launch taken apart: `bytes` at the front, the rest stays.
void* take(kernels::LaunchContext& context, Bytes bytes);

} // namespace gdn::trainer::cuda
