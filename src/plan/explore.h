#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace gdn::plan {

// One contiguous span of a decoder layer as a checkpoint nobody may offer yet, or a module of today.
struct ExploredSpan {
  std::string kind;          // "gdn+moe": the layers it acts on (others that have both its ends too)
  std::string first, last;   // op names; of a module: empty
  bool discard = false;
  std::string module = {};   // today's name, where a module is what was priced
  Bytes freed = 0;           // of the step's peak, against the run's own setting
  Bytes retained = 0;        // of what one micro-batch keeps on the fullest rank
  Seconds replay = 0;        // a step, on the busiest rank, more than the setting's own
  double value() const { return static_cast<double>(freed) / (replay > 1e-9 ? replay * 1e3 : 1e-6); } // bytes a millisecond
  std::string text() const;  // "conv1d..gates:discard", or the module
};

struct Exploration {
  Estimate base;                          // the run's own setting
  std::vector<ExploredSpan> spans;        // that lower the peak, best value first
  std::vector<ExploredSpan> modules;      // today's, in the same measure
  // Of `spans`: for every replay time the one that frees most, as long as the next step up is the best
  // of all steps (their upper hull). Fewest bytes first. What to offer.
  std::vector<ExploredSpan> front;
  std::int64_t tried = 0, impossible = 0; // impossible: no order of replays serves it
  std::vector<cost::Assumption> assumptions;
};

struct ExploreOptions {
  std::optional<Bytes> budget = {};
  std::function<void(double, const char*)> progress = {};
};

// Prices every contiguous span of every layer kind, in both kinds (whole block, and discard output where
// an op behind it reads an output), on top of the run's own setting, by the exact peak of the step.
Exploration explore(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
                    const ExploreOptions& options = {});

} // namespace gdn::plan
