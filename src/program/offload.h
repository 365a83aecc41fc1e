#pragma once
#include <functional>

#include "program/trace.h"

namespace gdn::program {

struct OffloadRule {
  // Whether tensors that the backward of this op reads go to the host.
  std::function<bool(const model::Op&)> op;
  Bytes smallest = 0;   // smaller tensors stay
  double fraction = 1;  // of the eligible tensors, in the order in which they are made
};

// Moves what crosses from forward to backward to the host: a tensor goes after its last use in the forward
// pass and is back from its first use in backward on. The unit's input and output stay, as does what an
// attribute refers to. Returns the bytes that cross the host link each way.
Bytes offload(UnitTrace& trace, const OffloadRule& rule);

} // namespace gdn::program
