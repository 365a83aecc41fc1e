#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/parameters.h"

// Which elements of a tensor somebody holds, whatever the parallelism. A checkpoint says so for every
// piece in it, and a run for every tensor that it wants: reading copies what both have in common.
namespace gdn::trainer::checkpoint {

using Shape = std::vector<std::int64_t>;

// A rectangle of a row-major tensor: indices [first[i], first[i] + count[i]) of every dimension i.
struct Box {
  std::vector<std::int64_t> first = {}, count = {};
  std::int64_t elements() const;
  friend bool operator==(const Box&, const Box&) = default;
};
std::string text_of(const Box& box); // "0:512,0:128": first and end of every dimension
// Throws Error{Checkpoint} for text that is no box inside `shape`.
Box parse_box(std::string_view text, const Shape& shape);

// Boxes one after the other in the holder's memory, each row-major; of all their elements in this
// order, [first, first + count) are held (the part of an optimizer that is divided over ranks).
struct Shard {
  std::vector<Box> boxes = {};
  std::int64_t first = 0, count = 0;
};
Shard whole(const Shape& shape);

// A rank's place in each group that divides weights.
struct ShardRanks {
  std::int64_t tp = 0, etp = 0, ep = 0;
};
// The weights of one rank, in the order in which it stores them: every section split by itself, then
// concatenated, expert after expert. Throws Error{Config} for what does not divide.
Shard shard_of(const model::Parameter& parameter, const config::Parallel& parallel, const ShardRanks& ranks);
// Elements [first, first + count) of what `shard` holds, in its order.
Shard part_of(const Shard& shard, std::int64_t first, std::int64_t count);

// Elements that follow one another in the tensor and in the holder's memory.
struct Extent {
  std::int64_t global = 0, local = 0, count = 0;
};
// In the order of `global`; as few as possible.
std::vector<Extent> extents(const Shard& shard, const Shape& shape);

} // namespace gdn::trainer::checkpoint
