#include "reference/sequences.h"

#include <string>

#include "core/error.h"
#include "core/units.h"

namespace gdn::reference {

void check_sequences(Sequences s, int64 rows, Coverage coverage) {
  auto fail = [](const std::string& what, const char* hint) {
    throw Error(ErrorCode::Config, "sequence offsets: " + what, hint);
  };
  if (s.empty()) fail("empty list", "N sequences need N + 1 offsets, the first of them 0");
  if (s[0] != 0) fail("the first is " + std::to_string(s[0]) + ", not 0", "offsets start at 0");
  for (std::size_t i = 1; i < s.size(); ++i)
    if (s[i] < s[i - 1])
      fail("offset " + std::to_string(i) + " is " + std::to_string(s[i]) + " after " +
               std::to_string(s[i - 1]),
           "offsets never decrease; equal ones are an empty sequence");
  if (s.back() > rows || (coverage == Coverage::Exact && s.back() != rows))
    fail("the last is " + std::to_string(s.back()) + ", but there are " + std::to_string(rows) +
             " tokens",
         coverage == Coverage::Exact ? "the last offset is the number of tokens"
                                     : "the last offset is at most the number of tokens");
}

int64 chunk_count(Sequences s, int64 chunk) {
  int64 n = 0;
  for (std::size_t i = 1; i < s.size(); ++i) n += ceil_div(s[i] - s[i - 1], chunk);
  return n;
}

} // namespace gdn::reference
