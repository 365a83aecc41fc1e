#pragma once
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "model/op.h"
#include "trainer/device.h"
#include "trainer/op_call.h"
#include "trainer/parameters.h"

namespace gdn::trainer {

// The forward half of a stack's op lists, for any number of rows: the very ops of training, without
// what only a backward pass or the loss wants.
class ForwardPass {
public:
  // A rank alone; model, run and parameters must outlive it. Throws Error{Config} for what decoding does
  // not have: several ranks, routing whose outcome depends on the other rows (capacity, forced balance).
  ForwardPass(const config::Model& model, const config::Run& run, Device& device, Parameters& parameters);

  // Logits [rows, padded vocabulary] of `batch`; valid until the next call. `states_of(layer)` are the states that
  // the layer's ops see; absent: each sequence starts from nothing and leaves nothing.
  using StatesOf = std::function<const SequenceStates*(std::int64_t layer)>;
  View logits(const MicroBatch& batch, const StatesOf& states_of = {});

  // The same in two halves, for who records a pass: memory for a number of rows and sequences, and the ops alone. The same
  // pass has its tensors at the same places until `reserve` moves them: then it returns true.
  bool reserve(std::int64_t rows, std::int64_t sequences);
  View run(const MicroBatch& batch, const StatesOf& states_of);

  std::int64_t vocabulary() const { return vocabulary_; } // padded

private:
  struct Unit {
    model::OpList list;
    std::vector<char> needed;   // by op
    std::vector<Bytes> place;   // by storage, in the workspace; -1: the input, or unused
    model::TensorId result = -1;
    Bytes scratch_at = 0, bytes = 0;
  };
  enum class End { Embedding, Head };
  const Unit& layer_unit(std::int64_t layer, std::int64_t rows, std::int64_t sequences);
  const Unit& end_unit(End end, std::int64_t rows);
  Unit lay_out(model::OpList list, model::TensorId result) const;
  // Unit outputs stay where they are until the run after the next.
  View run(const Unit& unit, const std::string& prefix, std::byte* input, const MicroBatch& batch, DeviceMemory& workspace);

  const config::Model& model_;
  config::Run run_;
  Device& device_;
  Parameters& parameters_;
  std::int64_t vocabulary_ = 0;
  using LayerKey = std::tuple<config::LayerKind, config::MlpKind, std::int64_t, std::int64_t>; // rows, sequences
  std::map<LayerKey, Unit> layers_;
  std::map<std::pair<End, std::int64_t>, Unit> ends_;
  DeviceMemory workspaces_[2]; // of the unit that runs, and of the one before: its output is the input
};

} // namespace gdn::trainer
