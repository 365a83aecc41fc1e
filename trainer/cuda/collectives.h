#pragma once
#include "trainer/comm/communicator.h"
#include "trainer/cuda/ops.h"

// Exchanges of rows between the ranks of a group, as ops need them. All of it is queued: exchanges come behind the ops
// before and ahead of those after.
namespace gdn::trainer::cuda {

using model::Group;

// The scratch that ranks_scratch (kernels/describe/ranks.h) adds to that of an op's kernels.
LaunchContext ranks_memory(const OpCall& c, const Engine& e);
// A contiguous matrix at the front of the scratch, which is cut off.
View take(LaunchContext& memory, DType dtype, std::int64_t rows, std::int64_t cols);

void copy(const View& from, const GradView& to, Engine& e);
inline void copy(const View& from, const View& to, Engine& e) { copy(from, GradView{to, false}, e); }
View rows_of(const View& v, std::int64_t first, std::int64_t rows);
View columns_of(const View& v, std::int64_t first, std::int64_t columns);
Part part_of(const View& v); // contiguous

// The rows of all ranks, one rank below the other, into `all` [ranks * rows, cols], contiguous. `mine` may be its part there.
void gather_rows(Communicator& group, const View& mine, const View& all, Engine& e);
// This rank's rows of the sum over all ranks of `all` [ranks * rows, cols], which is overwritten, into `mine`.
void scatter_sum(Communicator& group, const View& all, const GradView& mine, Engine& e);
// The sum (or maximum) over all ranks, in place; contiguous.
void reduce(Communicator& group, const View& v, Reduction reduction = Reduction::Sum);

// Ranks that share the tokens of a micro-batch; a router's losses are means over the tokens of all.
std::int64_t token_shards(const OpCall& c);
bool is_first_token_shard(const OpCall& c);

// Stretches of tokens that a context-parallel rank holds one behind the other.
struct Stretch {
  std::int64_t local = 0, token = 0, count = 0; // place at the rank, in the micro-batch
};
std::vector<Stretch> stretches(const TokenShards& shards, std::int64_t rank);

} // namespace gdn::trainer::cuda
