#include <fmt/core.h>

#include "model/validate.h"

// The contract of packed input. Lengths are checked one by one, never divided as a whole:
// truncating cumulative lengths by the context-parallel size would let sequences leak into each
// other.
namespace gdn::model {

std::vector<Violation> validate_packed(const PackedInput& in) {
  std::vector<Violation> found;
  auto reject = [&](Exception exception, const char* key, std::int64_t value, std::string message) {
    found.push_back({"gdn.14",
                     exception,
                     Verdict::Rejected,
                     key,
                     fmt::format("{}", value),
                     std::move(message),
                     {},
                     {}});
  };
  if (in.batch != 1)
    reject(Exception::AssertionError, "batch", in.batch, "packed input is one row");
  if (in.deterministic)
    reject(Exception::AssertionError, "deterministic", 1,
           "the deterministic rule knows no packed input");
  if (!in.kv_offsets.empty() && in.kv_offsets != in.offsets)
    reject(Exception::AssertionError, "kv_offsets", in.kv_offsets.back(),
           "offsets of queries and keys must be equal");
  if (in.offsets.size() < 2 || in.offsets.front() != 0) {
    reject(Exception::Plan, "offsets", in.offsets.empty() ? -1 : in.offsets.front(),
           "must start at 0 and end at the total");
    return found;
  }
  if (in.offsets.back() != in.total)
    reject(
        Exception::ValueError, "offsets", in.offsets.back(),
        fmt::format("the last offset is {}, the row has {} tokens", in.offsets.back(), in.total));
  for (size_t i = 0; i + 1 < in.offsets.size(); ++i) {
    const std::int64_t length = in.offsets[i + 1] - in.offsets[i];
    if (length <= 0)
      reject(Exception::Plan, "offsets", in.offsets[i + 1],
             fmt::format("sequence {} has length {}: offsets strictly increase", i, length));
    else if (length % in.cp != 0)
      reject(Exception::ValueError, "offsets", in.offsets[i + 1],
             fmt::format("sequence {} of length {} does not divide by cp = {}", i, length, in.cp));
    else if (in.zigzag && in.cp > 1 && length % (2 * in.cp) != 0)
      reject(Exception::ValueError, "offsets", in.offsets[i + 1],
             fmt::format("sequence {} of length {} does not divide by 2 x cp = {} (zig-zag)", i,
                         length, 2 * in.cp));
  }
  return found;
}

} // namespace gdn::model
