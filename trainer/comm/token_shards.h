#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace gdn::trainer {

class Communicator;

// Which tokens of a micro-batch each context-parallel rank holds, and what this one needs to know of its
// own. Every row of `seq` tokens is cut into 2 ranks pieces; rank r holds pieces r and 2 ranks - 1 - r, in
// this order (Megatron-LM's zig-zag), so all ranks see as many keys. Documents packed into a row may begin
// and end anywhere.
struct TokenShards {
  std::vector<std::vector<std::int64_t>> tokens; // [rank][i]: place in the micro-batch, ascending
  std::vector<std::int64_t> positions;           // of this rank's tokens in their sequences
  std::vector<std::int64_t> sequences;           // offsets of the sequences in this rank's tokens
};

// Throws Error{Config} unless a row divides into 2 ranks pieces.
TokenShards token_shards(std::span<const std::int64_t> sequences, std::int64_t rows, std::int64_t seq, std::int64_t ranks,
                         std::int64_t rank);

} // namespace gdn::trainer
