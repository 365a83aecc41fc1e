#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::megatron {

// The GDN mixer of Megatron-LM, from the module input x [N_sp, h] (residual stream in build `te`,
// normalised hidden states in build `local`) to its output [N_sp, h].
TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

// Whether the gates keep contiguous copies of their raw inputs (the tree of NVIDIA/Megatron-LM#5982)
// or views of the projection, which pin it (main; change `gate_views`: #5982's span ported to main).
bool gate_inputs_are_copies(const Revision& revision);

// The same with channel-wise gates (GDN2): wider projection, decay, erase and write gates.
TensorId gdn2_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::megatron
