#pragma once
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace gdn::plan {

// What one module of a setting does to the rank that peaks.
struct ModuleEffect {
  std::string module;
  std::int64_t layers = 0;     // decoder layers it acts on
  Bytes retained_freed = 0;    // by one micro-batch on the peaking rank, against no recompute
  Bytes promised = 0;          // times the micro-batches in flight: what one hopes for
  Bytes alone = 0;             // by how much the peak falls with this module alone
  Bytes marginal = 0;          // by how much the peak would rise without it, the others kept
  Seconds replay = 0;          // a step, on the busiest rank
  std::vector<std::string> reasons; // why less than promised
};

// One change to the run, priced: what it would do to the peak and to the step.
struct Lever {
  std::string change;          // "+ moe", "micro_batch_size 1", "cross entropy fused with the head (chunked)"
  Estimate estimate;
  Bytes freed = 0;             // of the peak; negative: it rises
  double cost = 0;             // in time per token, relative
  bool recompute = false;      // a setting of the same run
};

struct Explanation {
  Estimate without, with;      // no recompute, and the setting
  std::vector<ModuleEffect> modules;
  std::vector<std::string> findings;  // sentences, most important first
  std::vector<Lever> levers;   // that lower the peak, most first
  std::vector<cost::Assumption> assumptions;
};

// Why `setting` does less than hoped on this run. Everything said is measured on the program itself:
// each module alone and left out, and each lever, is priced exactly.
Explanation explain(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
                    const Setting& setting, std::optional<Bytes> budget = {});

} // namespace gdn::plan
