#pragma once
#include <span>
#include <string>
#include <vector>

#include "trainer/checkpoint/items.h"
#include "trainer/comm/ranks.h"
#include "trainer/parameters.h"

namespace gdn::trainer::checkpoint {

// What this rank holds, the same order on all ranks that hold the same. The first of those writes it.
std::vector<Item> items_of(const Parameters& parameters, const Ranks& ranks);

// An item in the memory of a run, in the order of its shard. Reading: together (see Parameters).
std::vector<float> get(Parameters& parameters, const Item& item);
void set(Parameters& parameters, const Item& item, std::span<const float> values);

// The texts of all members, in their order, on each of them. `host`: a communicator of host memory, such as the launcher's world makes.
std::vector<std::string> gather_texts(Communicator& host, const std::string& mine);

} // namespace gdn::trainer::checkpoint
