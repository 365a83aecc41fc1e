#pragma once
#include <string_view>

#include "config/model.h"
#include "config/run.h"
#include "model/op.h"

// The op lists of whichever stack a run names.
namespace gdn::model {

// As megatron::decoder_layer etc.; run.stack decides.
OpList decoder_layer(const config::Model& model, const config::Run& run, config::LayerKind mixer, config::MlpKind mlp);
OpList module_list(const config::Model& model, const config::Run& run, std::string_view module);
OpList embedding_unit(const config::Model& model, const config::Run& run);
OpList head_unit(const config::Model& model, const config::Run& run);

} // namespace gdn::model
