#include "trainer/comm/token_shards.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

TokenShards token_shards(std::span<const std::int64_t> sequences, std::int64_t rows, std::int64_t seq, std::int64_t ranks,
                         std::int64_t rank) {
  const std::int64_t pieces = 2 * ranks, piece = seq / pieces;
  if (seq % pieces != 0)
    throw Error(ErrorCode::Config, fmt::format("seq_length: {} tokens do not divide into 2 x {} pieces of the zig-zag order", seq, ranks),
                "context parallelism needs a multiple of twice its size");
  TokenShards out;
  out.tokens.resize(static_cast<size_t>(ranks));
  for (std::int64_t r = 0; r < ranks; ++r)
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t p : {r, pieces - 1 - r})
        for (std::int64_t t = 0; t < piece; ++t) out.tokens[static_cast<size_t>(r)].push_back(row * seq + p * piece + t);
  const auto& mine = out.tokens[static_cast<size_t>(rank)];
  out.sequences.push_back(0);
  for (size_t s = 0; s + 1 < sequences.size(); ++s) {
    const auto end = std::lower_bound(mine.begin(), mine.end(), sequences[s + 1]);
    for (auto t = mine.begin() + out.sequences.back(); t != end; ++t) out.positions.push_back(*t - sequences[s]);
    out.sequences.push_back(end - mine.begin());
  }
  return out;
}

} // namespace gdn::trainer
