#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/search.h"

namespace gdn::plan {

// The inverse question: which value of one quantity still fits.
enum class Unknown {
  Seq,        // largest sequence length
  MicroBatch, // largest micro-batch
  Gpus,       // smallest number of GPUs
  Budget      // smallest number of bytes a GPU must have
};
// "seq", "micro-batch", "gpus", "budget"; throws Error{Usage} with the nearest spelling.
Unknown parse_unknown(const std::string& text);

// What may change besides the unknown.
enum class Freedom {
  Setting, // nothing: the run's own recompute setting
  Plan,    // the recompute setting
  Search   // it, and the whole layout
};

struct SolveOptions {
  std::optional<Bytes> budget = {};
  std::int64_t step = 0;          // Seq: values are its multiples; 0: 1,024, or more where that would be over 4,096 values
  std::int64_t most_gpus = 16384; // Gpus: where to give up
  std::function<void(double, const char*)> progress = {};
};

struct Solution {
  std::int64_t value = 0;      // tokens, sequences, GPUs or bytes
  config::Run run;             // with the value, the layout and the setting that fit
  Estimate estimate;
};

struct Solved {
  std::optional<Solution> solution; // unset: no value fits
  std::int64_t tried = 0;           // values priced
  std::int64_t skipped = 0;         // illegal values
  std::string guard;                // why no other value can be better, without assuming that the peak is monotone
};

// Solves for `unknown`. Peaks are not monotone in any of the four (a shorter micro-batch puts more of
// them in flight, padding and workspaces step), so values are not bisected: every one that a bound does
// not rule out is priced, from the best end.
Solved solve(const config::Model& model, const config::Run& run, const config::Hardware& hardware, Unknown unknown,
             Freedom freedom, const SolveOptions& options = {});

} // namespace gdn::plan
