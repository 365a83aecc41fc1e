#pragma once
#include "kernels/common/matrix.h"

// Rows and tokens on their way between ranks.
namespace gdn::kernels {

// Rows from .. from + rows of one matrix are rows to .. to + rows of another.
struct RowSegment {
  std::int32_t from = 0, to = 0, rows = 0;
};
// map[from + i] = to + i for every segment (in device memory): a row map of one slot (kernels/moe/rows.h).
void segments_to_map(const RowSegment* segments, int count, std::int32_t* map, const LaunchContext& context);

// shift_tokens (kernels/loss/embedding.h) for a rank that holds some tokens of a micro-batch of `all`: to[i] stands at
// tokens[i] there.
void shift_tokens_of(const std::int64_t* from, const std::int32_t* positions, std::int64_t all, const std::int32_t* tokens, std::int64_t shift,
                     std::int64_t outside, const Matrix& to, const LaunchContext& context);

} // namespace gdn::kernels
