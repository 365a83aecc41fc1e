#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::megatron {

// The full-attention mixer of Megatron-LM, from the module input x [N_sp, h] (residual stream in
// build `te`, normalised hidden states in build `local`) to its output [N_sp, h].
TensorId attention_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::megatron
