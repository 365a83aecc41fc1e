#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/hardware.h"
#include "cost/cost.h"
#include "model/fp8.h"
#include "model/library_buffers.h"
#include "model/parameters.h"
#include "model/static_state.h"
#include "plan/data_parallel.h"
#include "plan/outside.h"
#include "plan/workload.h"

namespace gdn::plan {

// What one decoder layer (or end of the model) keeps and costs for one micro-batch.
struct LayerEstimate {
  std::int64_t index = -1;      // decoder layer; -1: embedding or head
  std::string kind;             // "gdn+moe", "attention+mlp", "embedding", "head"
  Bytes retained = 0;           // its input included, its output not
  Bytes input = 0;
  Seconds forward = 0, backward = 0, replay = 0;
};

// One pipeline rank.
struct RankEstimate {
  std::int64_t rank = 0;
  std::int64_t layers = 0;
  model::StaticState state = {};
  std::vector<model::LibraryBuffer> library = {}; // kept for the whole run through PyTorch's allocator
  program::StepPeak peak = {};          // static state included
  std::string peak_phase;               // "forward", "loss", "backward", "replay", "optimizer"
  std::string peak_event;               // "layer 3 (gdn+moe), backward rule.backward"
  Bytes forward_peak = 0, loss_peak = 0, backward_peak = 0, replay_peak = 0, optimizer_peak = 0;
  std::vector<std::pair<std::string, Bytes>> largest = {}; // tensors alive at the peak, largest first
  Bytes retained_per_micro_batch = 0;
  std::int64_t in_flight = 0;           // micro-batches (chunk forwards with vp > 1)
  Seconds forward = 0, backward = 0, replay = 0; // per micro-batch, all chunks
  Flops hardware_flops = 0;             // per micro-batch
  Seconds doubt = 0;                    // per micro-batch: how far the times may be off
  Bytes first_step_peak = 0;            // before the first update has made Adam's moments
  Bytes offloaded = 0;                  // activations that go to the host, per micro-batch
  Bytes host_bytes = 0;                 // host memory of this rank: activations in flight, optimizer state
  Seconds offload_seconds = 0;          // on the host link, per micro-batch and direction
};

// What replaying a module costs on the busiest rank, per step.
struct ReplayCost {
  std::string module, layer_kind; // "gdn_qkv", "gdn+moe"
  Seconds seconds = 0;
};

// What the allocator reserves, simulated: low as if every freed tensor could be used again at once, high
// with frees that wait for other streams and a share for what is not modelled.
struct ReservedBand {
  Bytes low = 0, high = 0;
};

struct Estimate {
  Setting setting;
  std::vector<RankEstimate> ranks;
  std::int64_t worst = 0;               // index into ranks
  // Memory of the worst rank.
  Bytes peak_bytes = 0;                 // allocated: what the tensors need
  CategoryBytes categories = {};        // at the peak; context and allocator included
  std::vector<OutsideRow> outside = {}; // context, communicators, workspaces
  Bytes allocator_bytes = 0;            // 4 % of allocated unless the profile says otherwise
  Bytes total_bytes = 0;                // allocated + outside + allocator
  Bytes budget_bytes = 0;
  bool fits = false, tight = false;
  // Time.
  Seconds step_seconds = 0, recompute_seconds = 0;  // recompute: replays of the busiest rank
  Seconds communication_seconds = 0, optimizer_seconds = 0, reduce_seconds = 0;
  double bubble = 0;
  Seconds step_low = 0, step_high = 0;  // the band: every time off by its doubt in one direction
  double tokens_per_second = 0, tokens_per_second_per_gpu = 0;
  double model_tflops_per_gpu = 0, mfu = 0, hfu = 0;

  const RankEstimate& worst_rank() const { return ranks[static_cast<size_t>(worst)]; }
  Bytes margin() const { return budget_bytes - total_bytes; }
};

// The optimizer's update of one rank, its share on the host included.
Seconds update_seconds(const cost::CostModel& cost, const model::Provider& provider, const config::Run& run, const model::StaticState& state);

// Prices settings of one (model, run, hardware). Everything that does not depend on the recompute
// setting is done once.
class Estimator {
public:
  // `budget`: bytes one GPU may use; unset: the profile's total. The arguments must outlive this.
  // `provider`: whose kernels run the ops; unset: those of the run's stack. Throws Error{Config} when a layer
  // of the model has no op list, naming its kind.
  Estimator(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
            std::optional<Bytes> budget = {}, const model::Provider* provider = nullptr);
  Estimator(const config::Model&, const config::Run&, config::Hardware&&, std::optional<Bytes> = {}, const model::Provider* = nullptr) = delete;

  Estimate evaluate(const Setting& setting);
  std::vector<LayerEstimate> layers(const Setting& setting); // in model order, every rank
  // Replays by module and layer kind, dearest first.
  std::vector<ReplayCost> replay_costs(const Setting& setting);
  // Of the ranks whose allocated peak is within 3 % of the worst. Unset: stack native, a step of more ops
  // than `most_ops`, or more than program::kLargestDevice.
  std::optional<ReservedBand> reserved(const Estimate& estimate, std::int64_t most_ops = 8000);
  Workload& workload() { return workload_; }
  const cost::CostModel& cost() const { return cost_; }
  const config::Hardware& hardware() const { return hardware_; }
  // Every assumption the figures rest on, sorted.
  std::vector<cost::Assumption> assumptions() const;

private:
  struct Rank {
    model::StaticState state;
    std::vector<model::LibraryBuffer> library; // beside it for the whole run
    std::vector<model::Chunk> chunks;
    std::vector<program::Slot> slots;        // for time: all micro-batches
    std::vector<program::Slot> steady_slots; // for the peak: the steady period once
  };
  RankEstimate evaluate_rank(const Rank& rank, std::int64_t index, const Setting& setting,
                             std::vector<Seconds>& forward, std::vector<Seconds>& backward);
  Bytes moment_bytes(const model::StaticState& state) const;
  DataParallelTime exchanged(const Rank& rank, std::int64_t index, const Setting& setting);
  // `[f][b]`: what chunk f's forward and chunk b's backward save beside each other.
  std::vector<std::vector<Seconds>> saved_beside(const Rank& rank, const Setting& setting);
  const cost::UnitTime& time_of(const TracedUnit& unit);
  std::string describe(const PlacedUnit& unit, int event) const;

  const config::Model& model_;
  const config::Run& run_;
  const config::Hardware& hardware_;
  Bytes budget_;
  Workload workload_;
  cost::CostModel cost_;
  model::ParameterTable table_;
  std::vector<Rank> ranks_;
  std::vector<model::Misaligned> misaligned_; // sizes that a low-precision recipe does not take
  std::vector<OutsideRow> outside_;
  Flops model_flops_per_token_ = 0;
  Bytes boundary_bytes_ = 0;                 // hidden states sent to the next stage
  std::map<const TracedUnit*, cost::UnitTime> times_;
};

} // namespace gdn::plan
