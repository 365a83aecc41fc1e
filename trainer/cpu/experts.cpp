#include "trainer/cpu/experts.h"

#include <algorithm>

#include "trainer/comm/ordered_sum.h"

namespace gdn::trainer::cpu {

namespace {

// Ranks of a group that the op exchanges over, forward or backward; 1: none.
std::int64_t ranks_of(const model::Op& op, Group group) {
  for (const model::Collective& c : op.collectives)
    if (c.group == group) return c.ranks;
  return 1;
}

Part rows_part(const View& v, std::int64_t first, std::int64_t rows) {
  return {v.data + first * v.cols * size_of(v.dtype), rows * v.cols * size_of(v.dtype)};
}

} // namespace

ExpertRoutes::ExpertRoutes(const OpCall& c, std::vector<std::int64_t> sent)
    : ExpertCounts(c.group(Group::Ep), c.group(Group::Etp), c.attr<model::MoeAttr>().local_experts, std::move(sent)) {}
ExpertRoutes::ExpertRoutes(const OpCall& c, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts)
    : ExpertCounts(c.group(Group::Ep), c.group(Group::Etp), c.attr<model::MoeAttr>().local_experts, std::move(sent), std::move(counts)) {}

Bytes ExpertRoutes::scratch_bytes(const model::Op& op, std::int64_t sent, std::int64_t bound, std::int64_t cols, DType dtype) {
  std::int64_t etp = ranks_of(op, Group::Etp);
  auto matrix = [&](std::int64_t rows) { return round_up(rows * cols * size_of(dtype), 8); };
  // Rows at home, those of all expert-tensor ranks and this one's; their parts of its sums.
  return matrix(sent) + 2 * matrix(bound) + (etp > 1 ? matrix(etp * bound) : 0);
}

void ExpertRoutes::out(const View& home, const GradView& experts, std::span<std::byte> scratch) const {
  const DType dtype = home.dtype;
  View leaving = home;
  if (home.stride != home.cols) copy_view(home, leaving = take(scratch, dtype, home.rows, home.cols));
  const std::int64_t mine = rows_from(etp_group_.rank());
  View arrived = take(scratch, dtype, mine, home.cols);
  std::vector<Part> to, from;
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(rows_part(leaving, first_sent(p), sent_to(p)));
    from.push_back(rows_part(arrived, row, arriving(p)));
    row += arriving(p);
  }
  ep_group_.all_to_all(to, from);
  View all = arrived;
  if (etp_ > 1) {
    all = take(scratch, dtype, groups().back(), home.cols);
    to.assign(static_cast<size_t>(etp_), rows_part(arrived, 0, mine));
    from.clear();
    row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      from.push_back(rows_part(all, row, rows_from(t)));
      row += rows_from(t);
    }
    etp_group_.all_to_all(to, from);
  }
  for_stretches([&](std::int64_t at, std::int64_t source, std::int64_t n) {
    if (n > 0) copy_view(rows_of(all, source, n), {rows_of(experts.to, at, n), experts.accumulate});
  });
  if (experts.accumulate) return;
  for (std::int64_t i = groups().back(); i < experts.to.rows; ++i)
    std::fill_n(rows_of(experts.to, i, 1).data, experts.to.cols * size_of(dtype), std::byte{0});
}

void ExpertRoutes::back(const View& experts, const GradView& home, std::span<std::byte> scratch) const {
  const DType dtype = experts.dtype;
  View all = take(scratch, dtype, groups().back(), experts.cols);
  for_stretches([&](std::int64_t at, std::int64_t source, std::int64_t n) {
    if (n > 0) copy_view(rows_of(experts, at, n), rows_of(all, source, n));
  });
  std::vector<Part> to, from;
  if (etp_ > 1) {
    const std::int64_t mine = rows_from(etp_group_.rank());
    const View parts = take(scratch, dtype, etp_ * mine, experts.cols);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      to.push_back(rows_part(all, row, rows_from(t)));
      from.push_back(rows_part(parts, t * mine, mine));
      row += rows_from(t);
    }
    etp_group_.all_to_all(to, from);
    all = rows_of(all, 0, mine); // what it held has been sent
    reduce_in_order(parts.data, static_cast<int>(etp_), mine * parts.cols, dtype, Reduction::Sum, all.data);
  }
  View arrived = home.to;
  const bool direct = !home.accumulate && home.to.stride == home.to.cols;
  if (!direct) arrived = take(scratch, dtype, home.to.rows, home.to.cols);
  if (const std::int64_t used = sent().back(); used < arrived.rows)
    std::fill_n(rows_of(arrived, used, 1).data, (arrived.rows - used) * arrived.cols * size_of(dtype), std::byte{0});
  to.clear();
  from.clear();
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(rows_part(all, row, arriving(p)));
    from.push_back(rows_part(arrived, first_sent(p), sent_to(p)));
    row += arriving(p);
  }
  ep_group_.all_to_all(to, from);
  if (!direct) copy_view(arrived, home);
}

} // namespace gdn::trainer::cpu
