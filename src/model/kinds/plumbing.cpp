#include "model/kinds/plumbing.h"

namespace gdn::model {

namespace {

std::vector<TensorId> view_op(Builder& b, std::string name, TensorId base, std::vector<TensorId> views) {
  Op& op = b.op(std::move(name), OpKind::View, {base}, views);
  op.steps.push_back({.name = "cat", .grad_reads = std::move(views), .grad_writes = {base}});
  return op.outputs;
}

std::vector<TensorId> group_views(Builder& b, TensorId base, std::int64_t groups, const std::vector<GroupSection>& sections,
                                  GradientStorage gradient) {
  const std::int64_t rows = b.at(base).rows() * groups, width = b.at(base).cols() / groups;
  std::vector<TensorId> views;
  for (const GroupSection& s : sections) {
    views.push_back(b.view(s.name, base, s.first, {rows, s.cols}, gradient));
    b.list().tensors.back().row_stride = width;
  }
  return views;
}

} // namespace

std::vector<TensorId> split(Builder& b, std::string name, TensorId base, const std::vector<ColumnSection>& sections) {
  std::vector<TensorId> views;
  std::int64_t first = 0;
  for (const ColumnSection& s : sections) {
    views.push_back(b.view(s.name, base, first, s.shape, GradientStorage::Own));
    first += b.at(views.back()).cols();
  }
  return view_op(b, std::move(name), base, std::move(views));
}

std::vector<TensorId> split_groups(Builder& b, std::string name, TensorId base, std::int64_t groups,
                                   const std::vector<GroupSection>& sections) {
  return view_op(b, std::move(name), base, group_views(b, base, groups, sections, GradientStorage::Own));
}

std::vector<TensorId> group_slices(Builder& b, TensorId base, std::int64_t groups, const std::vector<GroupSection>& sections) {
  return group_views(b, base, groups, sections, GradientStorage::Slice);
}

std::vector<TensorId> split_rows(Builder& b, std::string name, TensorId base, const std::vector<std::string>& parts) {
  std::vector<std::int64_t> shape = b.at(base).shape;
  shape[0] /= static_cast<std::int64_t>(parts.size());
  const std::int64_t part = shape[0] * b.at(base).cols();
  std::vector<TensorId> views;
  for (const std::string& p : parts)
    views.push_back(b.view(p, base, part * static_cast<std::int64_t>(views.size()), shape, GradientStorage::Own));
  return view_op(b, std::move(name), base, std::move(views));
}

TensorId copy(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape) {
  if (shape.empty()) shape = b.at(x).shape;
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, std::move(shape));
  Op& op = b.op(std::move(name), OpKind::Copy, {x}, {y});
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

TensorId concat(Builder& b, std::string name, const std::vector<TensorId>& inputs, Along along, std::string out) {
  std::int64_t rows = 0, cols = 0;
  for (TensorId t : inputs) {
    rows += b.at(t).rows();
    cols += b.at(t).cols();
  }
  if (along == Along::Columns) rows = b.at(inputs[0]).rows();
  else cols = b.at(inputs[0]).cols();
  TensorId y = b.tensor(std::move(out), b.at(inputs[0]).dtype, {rows, cols});
  Op& op = b.op(std::move(name), OpKind::Concat, inputs, {y}, RowsAttr{cols});
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = inputs});
  return y;
}

TensorId residual_add(Builder& b, std::string name, TensorId x, TensorId y, std::string out, bool dropout) {
  TensorId sum = b.tensor(out, b.at(x).dtype, b.at(x).shape);
  if (!dropout) {
    Op& op = b.op(std::move(name), OpKind::ResidualAdd, {x, y}, {sum});
    op.grad_aliases = {{x, sum}, {y, sum}};
    return sum;
  }
  TensorId mask = b.statistic(out + "_mask", DType::Bool, b.at(x).shape);
  Op& op = b.op(std::move(name), OpKind::ResidualAdd, {x, y}, {sum, mask});
  op.steps.push_back({.name = "backward", .reads = {mask}, .grad_reads = {sum}, .grad_writes = {y}});
  op.grad_aliases = {{x, sum}};
  return sum;
}

TensorId all_to_all(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape,
                    std::int64_t ranks, Attributes attr) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, std::move(shape));
  Collective exchange{CollectiveKind::AllToAll, Group::Cp, ranks, b.at(x).bytes()};
  Op& op = b.op(std::move(name), OpKind::AllToAll, {x}, {y}, std::move(attr));
  op.collectives = {exchange};
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}, .collectives = {exchange}});
  return y;
}

TensorId gather_columns(Builder& b, std::string name, TensorId x, std::int64_t ranks, bool reduce, std::string out, Attributes attr) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows(), b.at(x).cols() * ranks});
  Op& op = b.op(std::move(name), OpKind::AllGather, {x}, {y}, std::move(attr));
  op.collectives = {{CollectiveKind::AllGather, Group::Tp, ranks, b.at(y).bytes()}};
  Step backward{.name = "backward", .grad_reads = {y}, .grad_writes = {x}};
  if (reduce) backward.collectives = {{CollectiveKind::ReduceScatter, Group::Tp, ranks, b.at(y).bytes()}};
  op.steps = {std::move(backward)};
  return y;
}

TensorId all_reduce(Builder& b, std::string name, TensorId x, std::vector<Collective> sums, std::string out) {
  TensorId y = b.statistic(std::move(out), b.at(x).dtype, b.at(x).shape);
  b.op(std::move(name), OpKind::AllReduce, {x}, {y}).collectives = std::move(sums);
  return y;
}

TensorId scatter_rows(Builder& b, std::string name, TensorId x, std::int64_t ranks, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows() / ranks, b.at(x).cols()});
  Op& op = b.op(std::move(name), OpKind::ReduceScatter, {x}, {y});
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x},
                      .collectives = {{CollectiveKind::AllGather, Group::Tp, ranks, b.at(x).bytes()}}});
  return y;
}

TensorId data(Builder& b, std::string name, std::int64_t tokens, std::string out) {
  TensorId ids = b.statistic(std::move(out), DType::Int64, {tokens});
  b.op(std::move(name), OpKind::Data, {}, {ids});
  return ids;
}

} // namespace gdn::model
