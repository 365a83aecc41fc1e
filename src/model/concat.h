#pragma once
#include <vector>

#include "model/op.h"

namespace gdn::model {

// Several units in a row as one: unit i+1 reads unit i's output. Names get "L0.", "L1.", ... in
// front. Used where one span covers several layers (full recompute, uniform n).
OpList concat(const std::vector<const OpList*>& units);

} // namespace gdn::model
