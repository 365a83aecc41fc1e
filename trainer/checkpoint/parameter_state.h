#pragma once
#include <span>
#include <vector>

#include "trainer/checkpoint/items.h"
#include "trainer/parameters.h"

namespace gdn::trainer::checkpoint {

// An item in the memory of a run, in the order of its shard.
std::vector<float> get(Parameters& parameters, const Item& item);
void set(Parameters& parameters, const Item& item, std::span<const float> values);

} // namespace gdn::trainer::checkpoint
