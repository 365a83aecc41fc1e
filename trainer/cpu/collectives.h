#pragma once
#include "trainer/comm/communicator.h"
#include "trainer/cpu/ops.h"

// Exchanges of rows between the ranks of a group, as ops need them.
namespace gdn::trainer::cpu {

using model::Group;

// A contiguous matrix at the start of `memory`, which is cut off.
View take(std::span<std::byte>& memory, DType dtype, std::int64_t rows, std::int64_t cols);

// A view of some rows; the ids that a matrix holds.
View rows_of(const View& v, std::int64_t first, std::int64_t rows);
std::span<std::int64_t> ids_of(const View& v);

void copy_view(const View& from, const GradView& to);
inline void copy_view(const View& from, const View& to) { copy_view(from, GradView{to, false}); }

// The rows of all ranks, one rank below the other, into `all` [ranks * rows, cols]. `mine` may be its part there.
void gather_rows(Communicator& group, const View& mine, const View& all);
// This rank's rows of the sum over all ranks of `all` [ranks * rows, cols], which is overwritten, into `mine`.
void scatter_sum(Communicator& group, const View& all, const GradView& mine);
// The sum (or maximum) over all ranks, in place; contiguous.
void reduce(Communicator& group, const View& v, Reduction reduction = Reduction::Sum);

} // namespace gdn::trainer::cpu
