#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::megatron {

// Dense SwiGLU MLP, from the residual (build `te`: its norm is fused into FC1) or the normalised
// hidden states (`local`) to its output [N_sp, h].
TensorId dense_mlp(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

// Mixture of experts, from the normalised hidden states m_y [N_sp, h] (the norm before it is never
// fused) to its output [N_sp, h].
TensorId moe(Builder& b, TensorId m_y, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::megatron
