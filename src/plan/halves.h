#pragma once
#include <vector>

#include "model/op.h"

namespace gdn::plan {

// Cuts a list wherever nothing but the residual stream crosses: a decoder layer becomes its mixer and
// its MLP, so that summaries of one are shared by every layer that differs in the other only. Units
// that meet in one tensor compose exactly (program/summary.h). Op and tensor names stay.
std::vector<model::OpList> halves(const model::OpList& list);

} // namespace gdn::plan
