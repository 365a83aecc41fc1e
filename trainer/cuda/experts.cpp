#include "trainer/cuda/experts.h"

#include <cuda_runtime_api.h>

#include "kernels/common/check.h"
#include "kernels/common/elementwise.h"
#include "kernels/common/ordered_sum.h"
#include "kernels/moe/rows.h"
#include "kernels/ranks/rows.h"

namespace gdn::trainer::cuda {

ExpertRoutes::ExpertRoutes(const OpCall& c, Engine& e, std::vector<std::int64_t> sent)
    : ExpertCounts(c.group(Group::Ep), c.group(Group::Etp), c.attr<model::MoeAttr>().local_experts, std::move(sent)), call_(c), engine_(e) {}
ExpertRoutes::ExpertRoutes(const OpCall& c, Engine& e, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts)
    : ExpertCounts(c.group(Group::Ep), c.group(Group::Etp), c.attr<model::MoeAttr>().local_experts, std::move(sent), std::move(counts)), call_(c), engine_(e) {}

void ExpertRoutes::keep(const OpCall& c) const {
  std::vector<std::int64_t>& table = c.host_table(c.op_index());
  table = sent();
  table.insert(table.end(), counts().begin(), counts().end());
}

ExpertRoutes ExpertRoutes::known(const OpCall& c, Engine& e, int dispatch) {
  const std::vector<std::int64_t>& table = c.host_table(dispatch);
  const auto counts = table.begin() + c.attr<model::MoeAttr>().experts + 1;
  return {c, e, {table.begin(), counts}, {counts, table.end()}};
}

Matrix ExpertRoutes::map(LaunchContext& memory) const {
  std::vector<kernels::RowSegment> segments;
  for_stretches([&](std::int64_t at, std::int64_t source, std::int64_t n) {
    segments.push_back({static_cast<std::int32_t>(source), static_cast<std::int32_t>(at), static_cast<std::int32_t>(n)});
  });
  const View rows = take(memory, DType::Int32, groups().back(), 1), where = take(memory, DType::Int32, static_cast<std::int64_t>(segments.size()), 3);
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
  const std::int64_t mine = rows_from(etp_group_.rank());
  const View arrived = take(memory, dtype, mine, home.cols);
  std::vector<Part> to, from;
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(part_of(rows_of(leaving, first_sent(p), sent_to(p))));
    from.push_back(part_of(rows_of(arrived, row, arriving(p))));
    row += arriving(p);
  }
  ep_group_.all_to_all(to, from);
  View all = arrived;
  if (etp_ > 1) {
    all = take(memory, dtype, groups().back(), home.cols);
    to.assign(static_cast<size_t>(etp_), part_of(arrived));
    from.clear();
    row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      from.push_back(part_of(rows_of(all, row, rows_from(t))));
      row += rows_from(t);
    }
    etp_group_.all_to_all(to, from);
  }
  if (groups().back() > 0) kernels::spread_rows(matrix(all), map(memory), gradient(experts), engine_.launch());
  if (!experts.accumulate) zero_rows(experts.to, groups().back(), engine_);
}

void ExpertRoutes::back(const View& experts, const GradView& home) const {
  LaunchContext memory = ranks_memory(call_, engine_);
  const DType dtype = experts.dtype;
  View all = take(memory, dtype, groups().back(), experts.cols);
  if (groups().back() > 0) kernels::collect_rows(matrix(experts), map(memory), {matrix(all), false}, engine_.launch());
  std::vector<Part> to, from;
  if (etp_ > 1) {
    const std::int64_t mine = rows_from(etp_group_.rank());
    const View parts = take(memory, dtype, etp_ * mine, experts.cols);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < etp_; ++t) {
      to.push_back(part_of(rows_of(all, row, rows_from(t))));
      from.push_back(part_of(rows_of(parts, t * mine, mine)));
      row += rows_from(t);
    }
    etp_group_.all_to_all(to, from);
    all = rows_of(all, 0, mine); // what it held has been sent
    if (mine > 0) kernels::reduce_in_order({parts.data, static_cast<int>(etp_), mine * parts.cols}, dtype, false, all.data, engine_.launch());
  }
  View arrived = home.to;
  const bool direct = !home.accumulate && (home.to.rows <= 1 || home.to.stride == home.to.cols);
  if (!direct) arrived = take(memory, dtype, home.to.rows, home.to.cols);
  zero_rows(arrived, sent().back(), engine_);
  to.clear();
  from.clear();
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < ep_; ++p) {
    to.push_back(part_of(rows_of(all, row, arriving(p))));
    from.push_back(part_of(rows_of(arrived, first_sent(p), sent_to(p))));
    row += arriving(p);
  }
  ep_group_.all_to_all(to, from);
  if (!direct) copy(arrived, home, engine_);
}

} // namespace gdn::trainer::cuda
