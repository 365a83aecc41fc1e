#pragma once
#include <optional>
#include <string>
#include <vector>

#include "plan/estimate.h"

namespace gdn::plan {

struct Notice {
  std::string key;   // "inert.mlp", "nested.moe_act", "higher_peak", "culprit.static", "revision.gdn_qkv"
  std::string text;
};

struct Candidate {
  Estimate estimate;
  double cost_relative = 0; // step time against no recompute: 0.03 = 3 % slower
  bool dominated = false;   // another candidate is no slower and needs no more memory
  bool hypothetical = false; // uses a form no revision has, or a user span: never proposed
};

struct Proposal {
  Setting setting;
  std::vector<std::string> flags;   // Megatron-LM arguments to paste
  std::string revision_note;        // "needs main+gdn_qkv", or empty
};

// When nothing fits: how much is missing, and the first lever that would close it.
struct Overrun {
  Bytes bytes = 0;          // smallest over all candidates
  std::string setting, lever;
};

struct Plan {
  std::vector<Candidate> candidates; // fitting ones first, by tokens/s; then the rest by peak
  std::int64_t dominated = 0;        // how many candidates are dominated
  std::int64_t equal = 0;            // settings whose program equals a listed one's
  std::optional<Proposal> proposal;  // unset when nothing fits
  std::optional<Proposal> plain_proposal; // best for the base revision, when the best needs a change
  std::optional<Overrun> overrun;
  std::vector<Notice> notices;
  std::vector<cost::Assumption> assumptions;
};

struct PlanOptions {
  std::optional<Bytes> budget = {};
  bool hypothetical = false; // also forms and spans that no revision offers
};

// How far `estimate` is over its budget, and the first lever that would close the gap.
Overrun overrun_of(const Estimate& estimate);

// Every legal setting of the revision: all subsets of the modules that act on the model, and full
// recompute (uniform 1, 2, 3, 4, 6, 8; block 1 .. layers of a chunk).
std::vector<Setting> legal_settings(Workload& workload, bool hypothetical);

// Throws Error{Config} when the run breaks a rule whatever it recomputes (first rejected violation).
Plan make_plan(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
               const PlanOptions& options = {});

// What a list of modules does less than its names promise, for one setting.
std::vector<Notice> setting_notices(Workload& workload, const Setting& setting);

// Parts of the model that are counted and not modelled, by name.
std::vector<Notice> unmodelled_notices(const config::Model& model, const config::Run& run);

// Advice for an estimate that fits by capacity and is known to fail by fragmentation (70 % of the card
// and more); nothing otherwise.
std::optional<Notice> fragmentation_notice(const Estimate& estimate);

// Megatron-LM arguments of a setting: "--recompute-granularity", "selective", ...
std::vector<std::string> megatron_flags(const Setting& setting);

} // namespace gdn::plan
