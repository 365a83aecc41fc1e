#pragma once
#include <string_view>

#include "config/model.h"
#include "config/run.h"
#include "model/builder.h"
#include "model/dims.h"

namespace gdn::model::native {

// One decoder layer: mixer and MLP, each with its norm and residual add; x and the result [N_sp, h].
TensorId layer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d,
               config::LayerKind mixer, config::MlpKind mlp);

// The layer as a unit. Throws Error{Config} for mixers without an op list.
OpList decoder_layer(const config::Model& model, const config::Run& run, config::LayerKind mixer, config::MlpKind mlp);

// One module alone, "gdn", "gdn2", "attention", "moe" or "mlp", its norm included: its input, the
// residual stream, is the caller's and is not counted, its output is held by the caller.
// Throws Error{Usage} for another name.
OpList module_list(const config::Model& model, const config::Run& run, std::string_view module);

} // namespace gdn::model::native
