#include "trainer/checkpoint/shard.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include <fmt/core.h>

#include "core/error.h"
#include "core/units.h"

namespace gdn::trainer::checkpoint {

namespace {

size_t at(std::int64_t i) { return static_cast<size_t>(i); }

std::int64_t product(const std::vector<std::int64_t>& v) {
  return std::accumulate(v.begin(), v.end(), std::int64_t{1}, checked_mul);
}

// Calls `run(global offset, count)` for every stretch of a box that is contiguous in the tensor, in order.
template <class Run> void for_each_stretch(const Box& box, const Shape& shape, Run run) {
  if (box.elements() == 0) return;
  size_t inner = shape.size(); // dimensions from here on are whole
  while (inner > 0 && box.count[inner - 1] == shape[inner - 1]) --inner;
  const size_t outer = inner > 0 ? inner - 1 : 0; // the first partly held one joins them
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  const std::int64_t length = shape.empty() ? 1 : box.count[outer] * stride[outer];
  std::vector<std::int64_t> index(outer, 0);
  while (true) {
    std::int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); ++d) offset += (box.first[d] + (d < outer ? index[d] : 0)) * stride[d];
    run(offset, length);
    size_t d = outer;
    while (d > 0 && ++index[d - 1] == box.count[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

} // namespace

std::int64_t Box::elements() const { return product(count); }

std::string text_of(const Box& box) {
  std::string text;
  for (size_t d = 0; d < box.first.size(); ++d) text += fmt::format("{}{}:{}", d ? "," : "", box.first[d], box.first[d] + box.count[d]);
  return text;
}

Box parse_box(std::string_view text, const Shape& shape) {
  auto fail = [&] { return Error(ErrorCode::Checkpoint, fmt::format("'{}' is no part of a tensor of {} dimensions", text, shape.size())); };
  Box box;
  const char *from = text.data(), *end = text.data() + text.size();
  auto number = [&](char before) {
    if (before && (from == end || *from++ != before)) throw fail();
    std::int64_t value = 0;
    const auto [next, error] = std::from_chars(from, end, value);
    if (error != std::errc() || value < 0) throw fail();
    from = next;
    return value;
  };
  for (size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t first = number(d ? ',' : '\0'), last = number(':');
    if (first > last || last > shape[d]) throw fail();
    box.first.push_back(first);
    box.count.push_back(last - first);
  }
  if (from != end) throw fail();
  return box;
}

Shard whole(const Shape& shape) { return {{Box{std::vector<std::int64_t>(shape.size(), 0), shape}}, 0, product(shape)}; }

Shard shard_of(const model::Parameter& p, const config::Parallel& parallel, const ShardRanks& ranks) {
  const bool expert = p.group == model::ParameterGroup::RoutedExpert;
  Shard shard;
  const Shape local = model::local_shape(p, parallel);
  std::vector<model::RowRange> ranges; // neighbours joined
  for (const model::RowRange& r : model::shard_rows(p, parallel, expert ? ranks.etp : ranks.tp)) {
    if (!ranges.empty() && ranges.back().first + ranges.back().count == r.first) ranges.back().count += r.count;
    else ranges.push_back(r);
  }
  Box held{std::vector<std::int64_t>(p.shape.size(), 0), p.shape};
  if (expert) {
    held.first[0] = ranks.ep * local[0];
    held.count[0] = local[0];
  }
  // Several ranges interleave in memory below dimension `dim`: boxes for one outer index each.
  const bool interleaved = ranges.size() > 1 && p.dim > 0;
  std::int64_t outer = 1;
  for (int d = 0; interleaved && d < p.dim; ++d) outer *= held.count[at(d)];
  for (std::int64_t o = 0; o < outer; ++o)
    for (const model::RowRange& r : ranges) {
      Box box = held;
      std::int64_t rest = o;
      for (int d = p.dim; interleaved && d-- > 0; rest /= held.count[at(d)]) {
        box.first[at(d)] += rest % held.count[at(d)];
        box.count[at(d)] = 1;
      }
      box.first[at(p.dim)] = r.first;
      box.count[at(p.dim)] = r.count;
      shard.count += box.elements();
      shard.boxes.push_back(std::move(box));
    }
  return shard;
}

Shard part_of(const Shard& shard, std::int64_t first, std::int64_t count) {
  if (first < 0 || count < 0 || first > shard.count - count)
    throw Error(ErrorCode::Internal, fmt::format("elements [{}, {}) of a shard of {}", first, first + count, shard.count));
  Shard part = shard;
  part.first += first;
  part.count = count;
  return part;
}

std::vector<Extent> extents(const Shard& shard, const Shape& shape) {
  std::vector<Extent> all;
  std::int64_t passed = 0; // elements of the boxes so far
  for (const Box& box : shard.boxes)
    for_each_stretch(box, shape, [&](std::int64_t global, std::int64_t count) {
      const std::int64_t from = std::max<std::int64_t>(0, shard.first - passed);
      const std::int64_t to = std::min(count, shard.first + shard.count - passed);
      if (from < to) all.push_back({global + from, passed + from - shard.first, to - from});
      passed += count;
    });
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.global < b.global; });
  std::vector<Extent> joined;
  for (const Extent& e : all) {
    if (!joined.empty() && joined.back().global + joined.back().count == e.global && joined.back().local + joined.back().count == e.local)
      joined.back().count += e.count;
    else
      joined.push_back(e);
  }
  return joined;
}

} // namespace gdn::trainer::checkpoint
