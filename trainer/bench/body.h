#pragma once
#include <vector>

#include "trainer/session.h"

namespace gdn::trainer::bench {

// Forward and backward of the decoder layers alone.
struct BodyTimes {
  std::vector<double> seconds; // of each step after the warm-up
  std::int64_t tokens = 0;     // of one step
  Bytes activations = 0;       // ledger peak less weights, gradients and optimizer: scratch included
  Bytes arena = 0;             // extent of what was laid out for them
  double loss = 0;             // mean square of the last hidden state
};

// The layers are the middle stage of a pipeline of three whose ends hold no layer: the stage before sends a
// normal random residual stream, the one behind answers the last hidden state h with the gradient of its
// mean square, 2 h / elements. Both neighbours are played here, outside the time. One micro-batch; `run` is
// a run of one rank. Throws Error{Config} for a run of several.
BodyTimes bench_body(const config::Model& model, config::Run run, const plan::Setting& setting, Device& device, Bytes budget, int steps);

} // namespace gdn::trainer::bench
