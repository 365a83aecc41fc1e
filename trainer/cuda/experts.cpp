#include "trainer/cuda/experts.h"

#include <algorithm>
#include <numeric>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "kernels/common/check.h"
#include "kernels/common/elementwise.h"
#include "kernels/common/ordered_sum.h"
#include "kernels/moe/rows.h"
#include "kernels/ranks/rows.h"
#include "trainer/comm/ranks.h"

namespace gdn::trainer::cuda {

ExpertRoutes::ExpertRoutes(const OpCall& c, Engine& e)
    : call_(c), engine_(e), ep_group_(&c.group(Group::Ep)), etp_group_(&c.group(Group::Etp)), ep_(ep_group_->size()), etp_(etp_group_->size()),
      local_(c.attr<model::MoeAttr>().local_experts) {}

ExpertRoutes ExpertRoutes::asked(const OpCall& c, Engine& e, std::vector<std::int64_t> sent) {
  ExpertRoutes r(c, e);
  r.sent_ = std::move(sent);
  // Sums over ranks of which every one adds its own counts: first to the experts of all, then those of these experts.
  const auto experts = static_cast<size_t>(r.ep_ * r.local_), mine = static_cast<size_t>(r.ep_group_->rank()) * static_cast<size_t>(r.local_);
  std::vector<double> all(static_cast<size_t>(r.ep_) * experts);
  for (size_t i = 0; i < experts; ++i) all[static_cast<size_t>(r.ep_group_->rank()) * experts + i] = static_cast<double>(r.sent_[i + 1] - r.sent_[i]);
  r.ep_group_->sum_on_host(all);
  std::vector<double> here(static_cast<size_t>(r.etp_) * experts);
  for (size_t p = 0; p < static_cast<size_t>(r.ep_); ++p)
    for (size_t x = 0; x < static_cast<size_t>(r.local_); ++x)
      here[static_cast<size_t>(r.etp_group_->rank()) * experts + p * static_cast<size_t>(r.local_) + x] = all[p * experts + mine + x];
  if (r.etp_ > 1) r.etp_group_->sum_on_host(here);
  for (double n : here) r.counts_.push_back(static_cast<std::int64_t>(n));
  r.lay_out();
  return r;
}

void ExpertRoutes::keep(const OpCall& c) const {
  std::vector<std::int64_t>& table = c.host_table(c.op_index());
  table = sent_;
  table.insert(table.end(), counts_.begin(), counts_.end());
}

ExpertRoutes ExpertRoutes::known(const OpCall& c, Engine& e, int dispatch) {
  ExpertRoutes r(c, e);
  const std::vector<std::int64_t>& table = c.host_table(dispatch);
  const auto sent = table.begin() + r.ep_ * r.local_ + 1;
  r.sent_.assign(table.begin(), sent);
  r.counts_.assign(sent, table.end());
  r.lay_out();
  return r;
}

void ExpertRoutes::lay_out() {
  groups_ = {0};
  for (std::int64_t x = 0; x < local_; ++x) {
    std::int64_t rows = 0;
    for (std::int64_t t = 0; t < etp_; ++t)
      for (std::int64_t p = 0; p < ep_; ++p) rows += count(t, p, x);
    groups_.push_back(groups_.back() + rows);
  }
}

std::int64_t ExpertRoutes::rows_from(std::int64_t t) const {
  const auto first = counts_.begin() + t * ep_ * local_;
  return std::accumulate(first, first + ep_ * local_, std::int64_t{0});
}
std::int64_t ExpertRoutes::arriving(std::int64_t p) const {
  const auto first = counts_.begin() + (etp_group_->rank() * ep_ + p) * local_;
  return std::accumulate(first, first + local_, std::int64_t{0});
}

void ExpertRoutes::require(std::int64_t bound) const {
  if (groups_.back() > bound)
    throw Error(ErrorCode::DoesNotFit,
                fmt::format("{} routed rows arrive at the experts of rank {}, but {} are planned", groups_.back(), call_.context().ranks->rank(), bound),
                "a larger moe_imbalance plans for more; weights are those of the step before");
}

Matrix ExpertRoutes::map(LaunchContext& memory) const {
  std::vector<kernels::RowSegment> segments;
  std::vector<std::int64_t> next = groups_; // by local expert
  std::int64_t row = 0;
  for (std::int64_t s = 0; s < etp_ * ep_; ++s)
    for (std::int64_t x = 0; x < local_; ++x) {
      const std::int64_t n = counts_[static_cast<size_t>(s * local_ + x)];
      segments.push_back({static_cast<std::int32_t>(row), static_cast<std::int32_t>(next[static_cast<size_t>(x)]), static_cast<std::int32_t>(n)});
      next[static_cast<size_t>(x)] += n;
      row += n;
    }
  const View rows = take(memory, DType::Int32, row, 1), where = take(memory, DType::Int32, static_cast<std::int64_t>(segments.size()), 3);
  GDN_CUDA(cudaMemcpyAsync(where.data, segments.data(), segments.size() * sizeof segments[0], cudaMemcpyHostToDevice, engine_.stream));
  kernels::segments_to_map(reinterpret_cast<const kernels::RowSegment*>(where.data), static_cast<int>(segments.size()), reinterpret_cast<std::int32_t*>(rows.data),
                           engine_.launch());
  return matrix(rows);
}

namespace {

void zero_rows(const View& v, std::int64_t first, Engine& e) {
  if (first < v.rows) kernels::fill({matrix(rows_of(v, first, v.rows - first)), false}, 0, e.launch());
}

} // namespace

void ExpertRoutes::out(const View& home, const GradView& experts) const {
  LaunchContext memory = ranks_memory(call_, engine_);
  const DType dtype = home.dtype;
  View leaving = home;
  if (home.rows > 1 && home.stride != home.cols) copy(home, leaving = take(memory, dtype, home.rows, home.cols), engine_);
  const std::int64_t mine = rows_from(etp_group_->rank());
  const View arrived = take(memory, dtype, mine, home.cols);
  std::vector<Part> to, from;
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    const std::int64_t first = sent_[static_cast<size_t>(p * local_)], rows = sent_[static_cast<size_t>((p + 1) * local_)] - first;
    to.push_back(part_of(rows_of(leaving, first, rows)));
    from.push_back(part_of(rows_of(arrived, row, arriving(p))));
    row += arriving(p);
  }
  ep_group_->all_to_all(to, from);
  View all = arrived;
  if (etp_ > 1) {
    all = take(memory, dtype, groups_.back(), home.cols);
    to.assign(static_cast<size_t>(etp_), part_of(arrived));
    from.clear();
    row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      from.push_back(part_of(rows_of(all, row, rows_from(t))));
      row += rows_from(t);
    }
    etp_group_->all_to_all(to, from);
  }
  if (groups_.back() > 0) kernels::spread_rows(matrix(all), map(memory), gradient(experts), engine_.launch());
  if (!experts.accumulate) zero_rows(experts.to, groups_.back(), engine_);
}

void ExpertRoutes::back(const View& experts, const GradView& home) const {
  LaunchContext memory = ranks_memory(call_, engine_);
  const DType dtype = experts.dtype;
  View all = take(memory, dtype, groups_.back(), experts.cols);
  if (groups_.back() > 0) kernels::collect_rows(matrix(experts), map(memory), {matrix(all), false}, engine_.launch());
  std::vector<Part> to, from;
  if (etp_ > 1) {
    const std::int64_t mine = rows_from(etp_group_->rank());
    const View parts = take(memory, dtype, etp_ * mine, experts.cols);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      to.push_back(part_of(rows_of(all, row, rows_from(t))));
      from.push_back(part_of(rows_of(parts, t * mine, mine)));
      row += rows_from(t);
    }
    etp_group_->all_to_all(to, from);
    all = rows_of(all, 0, mine); // what it held has been sent
    if (mine > 0) kernels::reduce_in_order(parts.data, static_cast<int>(etp_), mine * parts.cols, dtype, false, all.data, engine_.launch());
  }
  View arrived = home.to;
  const bool direct = !home.accumulate && (home.to.rows <= 1 || home.to.stride == home.to.cols);
  if (!direct) arrived = take(memory, dtype, home.to.rows, home.to.cols);
  zero_rows(arrived, sent_.back(), engine_);
  to.clear();
  from.clear();
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(part_of(rows_of(all, row, arriving(p))));
    row += arriving(p);
    const std::int64_t first = sent_[static_cast<size_t>(p * local_)];
    from.push_back(part_of(rows_of(arrived, first, sent_[static_cast<size_t>((p + 1) * local_)] - first)));
  }
  ep_group_->all_to_all(to, from);
  if (!direct) copy(arrived, home, engine_);
}

} // namespace gdn::trainer::cuda
