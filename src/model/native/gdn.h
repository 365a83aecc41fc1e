#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::native {

// The GDN mixer of our own stack, from the residual stream x [N_sp, h] to its output [N_sp, h].
// Kept for backward: the projection, the triangular inverse, the rule's output and the chunk sums of
// the gates. Everything elementwise is rebuilt (the default spans of src/model/spans.cpp).
TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

// The same with channel-wise gates (GDN2): a wider projection, and both 64-wide matrices of the rule.
TensorId gdn2_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::native
