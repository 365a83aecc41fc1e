#pragma once
#include <string>
#include <utility>
#include <vector>

#include "plan/workload.h"
#include "program/program.h"

namespace gdn::trainer {

// What a step will need on this rank, before anything is allocated.
struct Prediction {
  CategoryBytes state;          // parameters, gradients, optimizer
  Bytes peak_bytes = 0;         // of live tensors, state included: what gdnplan reports
  CategoryBytes at_peak;        // by category
  std::string peak_event;       // "layers.3.backward rule.backward #mb0"
  std::vector<std::pair<std::string, Bytes>> largest; // live at the peak, largest first
  Bytes arena_bytes = 0;        // extent of the laid-out transient memory, guards included
  Bytes total_bytes() const { return state.total() + arena_bytes; } // what must be allocated
};

// Composes the summaries of the very units that the program is made of, as gdnplan does, and lays the
// program out. Throws Error{Internal} if composed and flat peak differ. The program is that of `pipeline_rank`.
Prediction predict(plan::Workload& workload, const plan::Setting& setting, const program::Program& program, std::int64_t pipeline_rank = 0);

// "none": the cheapest setting, by replayed ops, whose allocations stay within `budget`; empty if none does.
struct Fitting {
  std::string setting;
  Bytes bytes = 0;
};
Fitting setting_that_fits(plan::Workload& workload, Bytes budget, std::int64_t pipeline_rank = 0);
// The setting with the smallest peak, and what it allocates.
Fitting smallest_setting(plan::Workload& workload, std::int64_t pipeline_rank = 0);

// A message for a setting that does not fit: what it needs, the tensors at its peak, what would fit.
std::string does_not_fit(plan::Workload& workload, const plan::Setting& setting, const Prediction& prediction, Bytes budget,
                         std::int64_t pipeline_rank = 0);

} // namespace gdn::trainer
