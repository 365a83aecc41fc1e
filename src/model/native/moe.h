#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::native {

// Mixture of experts with its norm, from the residual stream m [N_sp, h] to its output [N_sp, h]. Kept
// for backward: router logits, k slots a token of routing, FC1's outputs of routed and shared experts
// and, where tokens cross ranks, the rows received. Probabilities are folded into the activations, so
// no expert's output is needed again.
TensorId moe(Builder& b, TensorId m, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::native
