#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/op.h"

namespace gdn::model::megatron {

// Token ids to the residual stream [N_sp, h].
OpList embedding_unit(const config::Model& model, const config::Run& run);

// Residual stream to the loss: final norm, multi-token prediction where the run trains it, head,
// cross entropy, loss.
OpList head_unit(const config::Model& model, const config::Run& run);

} // namespace gdn::model::megatron
