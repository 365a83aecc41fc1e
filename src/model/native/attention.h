#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::native {

// The full-attention mixer, from the residual stream x [N_sp, h] to its output [N_sp, h]. Kept for
// backward: the projection, the core's output and its log-sum-exp. Norms, rotation and the output gate
// are rebuilt.
TensorId attention_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::native
