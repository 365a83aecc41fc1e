#pragma once
#include "config/model.h"
#include "config/run.h"
#include "model/op.h"

namespace gdn::model::native {

// Token ids to the residual stream [N_sp, h].
OpList embedding_unit(const config::Model& model, const config::Run& run);

// Residual stream to the loss: final norm, multi-token prediction where the run trains it, head and
// cross entropy, loss. Head and loss are one op over chunks of tokens (run.loss_chunk, else 2048) unless
// the run names another form: `native` keeps the logits and their log-sum-exp, `te` writes the gradient
// over the logits in forward.
OpList head_unit(const config::Model& model, const config::Run& run);

} // namespace gdn::model::native
