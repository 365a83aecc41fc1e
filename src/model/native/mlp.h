#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::native {

// Dense SwiGLU MLP with its norm, from the residual stream m [N_sp, h] to its output [N_sp, h]. Kept for
// backward: FC1's output.
TensorId dense_mlp(Builder& b, TensorId m, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::native
