#pragma once
#include <cstdint>
#include <vector>

#include "trainer/comm/token_shards.h"
#include "trainer/op_call.h"

namespace gdn::trainer {

// The exchange of tokens for heads over a context-parallel group: one side has some tokens and all columns, the other all
// tokens and, of every section of columns, one rank's part.
struct TokenHeads {
  Communicator& group;
  const TokenShards& shards;
  std::vector<std::int64_t> sections; // columns of a section on the token side
  std::int64_t ranks, width;          // width: columns of the head side

  TokenHeads(const OpCall& call, std::int64_t columns); // of the token side

  // Calls f(first column on the token side, first on the head side, columns) for the parts of `rank`.
  template <class F> void for_parts(std::int64_t rank, F&& f) const {
    std::int64_t at = 0, head_at = 0;
    for (std::int64_t s : sections) {
      f(at + rank * (s / ranks), head_at, s / ranks);
      at += s;
      head_at += s / ranks;
    }
  }
};

// Rows and columns of an operand with heads in its rows count as [tokens, columns].
View as_tokens(const OpCall& call, const View& v, bool token_side);
// Whether the op's forward goes from tokens to heads.
bool to_heads(const OpCall& call);

} // namespace gdn::trainer
