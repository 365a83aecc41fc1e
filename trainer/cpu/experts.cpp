#include "trainer/cpu/experts.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "trainer/comm/ordered_sum.h"
#include "trainer/comm/ranks.h"

namespace gdn::trainer::cpu {

namespace {

// Ranks of a group that the op exchanges over, forward or backward; 1: none.
std::int64_t ranks_of(const model::Op& op, Group group) {
  for (const model::Collective& c : op.collectives)
    if (c.group == group) return c.ranks;
  return 1;
}

View rows_of(const View& v, std::int64_t first, std::int64_t rows) {
  return {v.data + first * v.stride * size_of(v.dtype), v.dtype, rows, v.cols, v.stride};
}
Part part_of(const View& v, std::int64_t first, std::int64_t rows) {
  return {v.data + first * v.cols * size_of(v.dtype), rows * v.cols * size_of(v.dtype)};
}
template <class T> Part part_of(std::vector<T>& v, std::int64_t first, std::int64_t n) {
  return {reinterpret_cast<std::byte*>(v.data() + first), n * static_cast<Bytes>(sizeof(T))};
}

} // namespace

ExpertRoutes::ExpertRoutes(const OpCall& c, std::vector<std::int64_t> sent) : ExpertRoutes(c, std::move(sent), {}) {
  std::vector<std::int64_t> mine, arriving(static_cast<size_t>(ep_ * local_));
  for (size_t e = 0; e + 1 < sent_.size(); ++e) mine.push_back(sent_[e + 1] - sent_[e]);
  std::vector<Part> to, from;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(part_of(mine, p * local_, local_));
    from.push_back(part_of(arriving, p * local_, local_));
  }
  ep_group_->all_to_all(to, from);
  counts_.resize(static_cast<size_t>(etp_ * ep_ * local_));
  etp_group_->all_gather(reinterpret_cast<const std::byte*>(arriving.data()), reinterpret_cast<std::byte*>(counts_.data()), ep_ * local_ * 8);
  lay_out();
}

ExpertRoutes::ExpertRoutes(const OpCall& c, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts)
    : call_(c), ep_group_(&c.group(Group::Ep)), etp_group_(&c.group(Group::Etp)), ep_(ep_group_->size()), etp_(etp_group_->size()),
      local_(c.attr<model::MoeAttr>().local_experts), sent_(std::move(sent)), counts_(std::move(counts)) {
  if (!counts_.empty()) lay_out();
}

void ExpertRoutes::lay_out() {
  groups_ = {0};
  for (std::int64_t e = 0; e < local_; ++e) {
    std::int64_t rows = 0;
    for (std::int64_t t = 0; t < etp_; ++t)
      for (std::int64_t p = 0; p < ep_; ++p) rows += count(t, p, e);
    groups_.push_back(groups_.back() + rows);
  }
}

std::int64_t ExpertRoutes::rows_from(std::int64_t t) const {
  const auto first = counts_.begin() + t * ep_ * local_;
  return std::accumulate(first, first + ep_ * local_, std::int64_t{0});
}

template <class F> void ExpertRoutes::for_stretches(F&& f) const {
  std::vector<std::int64_t> next = groups_; // by local expert
  std::vector<std::vector<std::int64_t>> at(static_cast<size_t>(etp_ * ep_));
  std::int64_t row = 0;
  for (auto& source : at) {
    const auto s = &source - at.data();
    for (std::int64_t e = 0; e < local_; ++e) {
      source.push_back(row);
      row += counts_[static_cast<size_t>(s * local_ + e)];
    }
  }
  for (std::int64_t e = 0; e < local_; ++e)
    for (size_t s = 0; s < at.size(); ++s) {
      const std::int64_t n = counts_[s * static_cast<size_t>(local_) + static_cast<size_t>(e)];
      f(next[static_cast<size_t>(e)], at[s][static_cast<size_t>(e)], n);
      next[static_cast<size_t>(e)] += n;
    }
}

void ExpertRoutes::require(std::int64_t bound) const {
  if (groups_.back() > bound)
    throw Error(ErrorCode::DoesNotFit,
                fmt::format("{} routed rows arrive at the experts of rank {}, but {} are planned", groups_.back(), call_.context().ranks->rank(), bound),
                "a larger moe_imbalance plans for more; weights are those of the step before");
}

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
  const std::int64_t mine = rows_from(etp_group_->rank());
  View arrived = take(scratch, dtype, mine, home.cols);
  std::vector<Part> to, from;
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    const std::int64_t first = sent_[static_cast<size_t>(p * local_)], rows = sent_[static_cast<size_t>((p + 1) * local_)] - first;
    std::int64_t coming = 0;
    for (std::int64_t e = 0; e < local_; ++e) coming += count(etp_group_->rank(), p, e);
    to.push_back(part_of(leaving, first, rows));
    from.push_back(part_of(arrived, row, coming));
    row += coming;
  }
  ep_group_->all_to_all(to, from);
  View all = arrived;
  if (etp_ > 1) {
    all = take(scratch, dtype, groups_.back(), home.cols);
    to.assign(static_cast<size_t>(etp_), part_of(arrived, 0, mine));
    from.clear();
    row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      from.push_back(part_of(all, row, rows_from(t)));
      row += rows_from(t);
    }
    etp_group_->all_to_all(to, from);
  }
  for_stretches([&](std::int64_t at, std::int64_t source, std::int64_t n) {
    if (n > 0) copy_view(rows_of(all, source, n), {rows_of(experts.to, at, n), experts.accumulate});
  });
  if (experts.accumulate) return;
  for (std::int64_t i = groups_.back(); i < experts.to.rows; ++i)
    std::fill_n(rows_of(experts.to, i, 1).data, experts.to.cols * size_of(dtype), std::byte{0});
}

void ExpertRoutes::back(const View& experts, const GradView& home, std::span<std::byte> scratch) const {
  const DType dtype = experts.dtype;
  View all = take(scratch, dtype, groups_.back(), experts.cols);
  for_stretches([&](std::int64_t at, std::int64_t source, std::int64_t n) {
    if (n > 0) copy_view(rows_of(experts, at, n), rows_of(all, source, n));
  });
  std::vector<Part> to, from;
  if (etp_ > 1) {
    const std::int64_t mine = rows_from(etp_group_->rank());
    const View parts = take(scratch, dtype, etp_ * mine, experts.cols);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      to.push_back(part_of(all, row, rows_from(t)));
      from.push_back(part_of(parts, t * mine, mine));
      row += rows_from(t);
    }
    etp_group_->all_to_all(to, from);
    all = rows_of(all, 0, mine); // what it held has been sent
    reduce_in_order(parts.data, static_cast<int>(etp_), mine * parts.cols, dtype, Reduction::Sum, all.data);
  }
  View arrived = home.to;
  const bool direct = !home.accumulate && home.to.stride == home.to.cols;
  if (!direct) arrived = take(scratch, dtype, home.to.rows, home.to.cols);
  if (const std::int64_t used = sent_.back(); used < arrived.rows)
    std::fill_n(rows_of(arrived, used, 1).data, (arrived.rows - used) * arrived.cols * size_of(dtype), std::byte{0});
  to.clear();
  from.clear();
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    std::int64_t leaving = 0;
    for (std::int64_t e = 0; e < local_; ++e) leaving += count(etp_group_->rank(), p, e);
    const std::int64_t first = sent_[static_cast<size_t>(p * local_)];
    to.push_back(part_of(all, row, leaving));
    from.push_back(part_of(arrived, first, sent_[static_cast<size_t>((p + 1) * local_)] - first));
    row += leaving;
  }
  ep_group_->all_to_all(to, from);
  if (!direct) copy_view(arrived, home);
}

} // namespace gdn::trainer::cpu
