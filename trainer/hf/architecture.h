#pragma once
#include <filesystem>

#include "config/model.h"

namespace gdn::trainer::hf {

// Whether the config.json of `folder` means `model` in everything that no tensor's shape shows: the
// rotary base, epsilons, top-k, head counts, ... (shapes are checked when the weights are opened).
// Error{Checkpoint} naming the first key that differs, and both values.
void require_same_architecture(const config::Model& model, const std::filesystem::path& folder);

} // namespace gdn::trainer::hf
