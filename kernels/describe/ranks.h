#pragma once
#include "core/units.h"
#include "model/op.h"

namespace gdn::kernels {

// Scratch that an op or backward step (step -1: forward) needs behind its kernels' because of other ranks: what it
// gathers, packs and sends, and slices of parameters of which it needs its rank's heads. 0 on one rank. What
// linears, heads and AllToAll gather is in their own descriptions (own.cpp).
Bytes ranks_scratch(const model::OpList& list, const model::Op& op, int step);

} // namespace gdn::kernels
