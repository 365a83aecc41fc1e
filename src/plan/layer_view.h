#pragma once
#include <memory>
#include <string>
#include <vector>

#include "config/model.h"
#include "cost/cost.h"
#include "plan/setting.h"
#include "program/summary.h"

namespace gdn::plan {

// One tensor of a layer under a setting.
struct TensorView {
  std::string name, storage;
  std::string made_by;         // op name; "input" for the layer's input
  std::vector<std::int64_t> shape;
  DType dtype = DType::BF16;
  Bytes bytes = 0;
  // "kept", "freed", "replayed" (dropped, made again in backward), "input", "output", "view of X"
  std::string state;
  std::string span;            // the module that replays it
};

// A layer, or a module of one, alone on a rank: what it keeps, its peaks and times. Peaks are above
// the level before the forward; input, parameters, their gradients and the output's gradient are not
// counted, the output is (its caller holds it).
struct LayerView {
  std::string name;
  std::int64_t tokens = 0;
  Bytes retained = 0;          // the input included, the output not
  Bytes input = 0, output = 0;
  Bytes forward_peak = 0, backward_peak = 0, replay_peak = 0;
  std::string forward_event, backward_event;
  cost::UnitTime time;
  std::vector<TensorView> tensors;
  std::vector<cost::Assumption> assumptions;
};

// `which`: "gdn", "attention", "moe", "mlp", "gdn2" (the module alone), or the index of a decoder layer.
// Throws Error{Usage} when the model has no such layer.
LayerView view_layer(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
                     const std::string& which, const Setting& setting);

} // namespace gdn::plan
