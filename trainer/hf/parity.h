#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "core/dtype.h"
#include "plan/setting.h"
#include "report/document.h"
#include "trainer/safetensors.h"
#include "trainer/session.h"

// A checkpoint against what another implementation computed from it: loss, logits, hidden states and
// every gradient, on any device and stack.
namespace gdn::trainer::hf {

inline constexpr const char* kReferenceFile = "reference.safetensors";

// How far a value may be from the reference: the ratio of L2 norms, difference to reference, except
// where `activation_by_largest` compares the largest |difference| with the largest |reference|.
struct Tolerance {
  double loss = 0;
  double activation = 0; // hidden states and logits
  bool activation_by_largest = false;
  double gradient = 0;
  double decay = 0;      // gradients of A_log, dt_bias and in_proj_a
};
// For runs in `dtype` (FP32 or BF16) against an FP32 reference.
Tolerance tolerance(DType dtype, bool experts);

// A gradient beside its exact value, which this program computes in double from the same weights.
struct Exactness {
  double ours = 0, reference = 0; // L2 of the difference to the exact value / L2 of that
  double rounding = 0;            // how far the rounding of an fp32 reference may be off; see parity.cpp
};

// One compared tensor, under the name that the checkpoint has for it.
struct Difference {
  std::string name;       // "loss", "logits", "hidden.1", "grad.model.norm.weight"
  std::vector<std::int64_t> shape = {};
  double largest = 0;     // largest |difference| / largest |reference|
  double norm = 0;        // L2 of the difference / L2 of the reference
  double allowed = 0;
  bool by_norm = false;   // which of the two is held against `allowed`
  std::optional<Exactness> exact = {}; // gradients of the decay that differ from an fp32 reference
  std::int64_t worst = 0; // flat index of the largest difference, or of the first that is not finite
  double found = 0, expected = 0; // there

  double measured() const { return by_norm ? norm : largest; }
  bool near_reference() const { return measured() <= allowed; } // false for NaN
  // The exact value decides where the reference is off it by no more than its rounding explains.
  bool near_exact() const { return exact && exact->ours <= allowed && exact->reference <= exact->rounding; }
  bool ok() const { return near_reference() || near_exact(); }
  std::string coordinate() const;                   // "[0, 17, 3]"
};
// `found` and `expected` have the elements of `shape`.
Difference difference(std::string name, std::vector<std::int64_t> shape, std::span<const float> found,
                      std::span<const float> expected, double allowed, bool by_norm);

struct ParityReport {
  std::vector<Difference> rows = {}; // in the order of the computation: hidden states, logits, loss, gradients
  Ledger::Peak peak = {};
  Seconds seconds = 0;

  const Difference* first_mismatch() const; // nullptr: all within tolerance
};

// What reference.safetensors holds.
class Reference {
public:
  // Error{Checkpoint} naming file and tensor when one that every reference has is missing or odd.
  explicit Reference(const std::filesystem::path& folder);

  std::int64_t batch() const { return batch_; }
  std::int64_t seq() const { return seq_; }
  Batch tokens() const;
  std::vector<float> values(const std::string& name) const;
  const SafetensorsFile& file() const { return file_; }

private:
  std::vector<std::int64_t> integers(const std::string& name) const;

  SafetensorsFile file_;
  std::int64_t batch_ = 0, seq_ = 0;
};

// The run that the reference is of: its batch, its vocabulary without padding, logits that exist, no
// auxiliary loss. Stack, dtype and modules are the caller's.
config::Run parity_run(config::Run run, std::int64_t batch, std::int64_t seq);
config::Run parity_run(config::Run run, const Reference& reference);
config::Model parity_model(config::Model model);

// Loads the checkpoint of `folder`, runs one forward and backward with `setting`, compares.
ParityReport compare_with_reference(const std::filesystem::path& folder, const config::Model& model, const config::Run& run,
                                    const plan::Setting& setting, Device& device);

// A row per tensor, and the first mismatch with its coordinate.
void add_to(report::Document& document, const ParityReport& report);
std::string describe(const Difference& mismatch); // "loss at [0]: 5.1, expected 5.2 (...)"

} // namespace gdn::trainer::hf
