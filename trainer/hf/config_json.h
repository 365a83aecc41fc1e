#pragma once
#include <string>

#include "config/model.h"
#include "core/dtype.h"

namespace gdn::trainer::hf {

// Error{Checkpoint} naming what this model has and the architecture has not (GDN2, other norms,
// biases, ...). `model_type` is one of qwen3_next, qwen3_5_text, qwen3_5_moe_text.
void require_expressible(const config::Model& model, const std::string& model_type);

// The text of a config.json with which transformers builds this model, after the same check.
// `dtype` is that of the weights.
std::string config_json(const config::Model& model, const std::string& model_type, DType dtype);

} // namespace gdn::trainer::hf
