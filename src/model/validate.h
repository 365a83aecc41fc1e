#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"
#include "config/run.h"

// The target stack's own checks of a configuration, before a cluster job starts: every rule of
// Megatron-LM main d98e8a64 (and of the revision planned for) that a model and a run can break.
namespace gdn::model {

// What the stack raises. Plan: our own rule; the stack has no such setting.
enum class Exception {
  AssertionError,
  ValueError,
  NotImplementedError,
  ImportError,
  RuntimeError,
  Warning,
  Plan
};
std::string_view
name_of(Exception exception); // "ValueError", "warning", "configuration error", ...

enum class Verdict {
  Rejected,
  // The stack refuses it, but a plan can go on with a notice: a module that is inert in these
  // models, build `local` (module-level calibration), a hypothetical module.
  Tolerated,
  Warned // the stack only warns
};

struct Violation {
  std::string rule; // "recompute.8", "offload.3", "gdn.5", "parallel.batch", "plan.l2norm"
  Exception exception = Exception::ValueError;
  Verdict verdict = Verdict::Rejected;
  std::string key;     // as in a run file: "recompute_modules"
  std::string value;   // the offending value
  std::string message; // what is wrong
  std::string allowed; // what would be legal, if it can be listed
  std::string hint;    // the nearest spelling, or what to do
};

// "ValueError: recompute.modules = moe_act: needs moe_grouped_gemm (allowed: ...; hint)"
std::string describe(const Violation& violation);
bool any_rejected(const std::vector<Violation>& violations);

// Every violation, in the order in which the stack meets them (arguments, configuration object,
// model construction, run time): the first rejected one is the error that the stack would stop at.
std::vector<Violation> validate(const config::Model& model, const config::Run& run);

// A packed micro-batch: sequence i is [offsets[i], offsets[i + 1]) of one row of `total` tokens.
struct PackedInput {
  std::vector<std::int64_t> offsets;         // cu_seqlens, from 0, strictly increasing
  std::vector<std::int64_t> kv_offsets = {}; // empty: the same
  std::int64_t total = 0;                    // tokens in the row
  std::int64_t batch = 1, cp = 1;
  bool zigzag = true; // load-balanced CP: lengths divide by 2 * cp
  bool deterministic = false;
};
std::vector<Violation> validate_packed(const PackedInput& input);

} // namespace gdn::model
