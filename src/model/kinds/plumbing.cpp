#include "model/kinds/plumbing.h"

namespace gdn::model {

std::vector<TensorId> split(Builder& b, std::string name, TensorId base, const std::vector<Section>& sections) {
  std::vector<TensorId> views;
  std::int64_t first = 0;
  for (const Section& s : sections) {
    views.push_back(b.view(s.name, base, first, s.shape, GradientStorage::Own));
    first += b.at(views.back()).cols();
  }
  Op& op = b.op(std::move(name), OpKind::View, {base}, views);
  op.steps.push_back({.name = "cat", .grad_reads = views, .grad_writes = {base}});
  return views;
}

TensorId copy(Builder& b, std::string name, TensorId x, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, b.at(x).shape);
  Op& op = b.op(std::move(name), OpKind::Copy, {x}, {y});
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

TensorId residual_add(Builder& b, std::string name, TensorId x, TensorId y, std::string out) {
  TensorId sum = b.tensor(std::move(out), b.at(x).dtype, b.at(x).shape);
  Op& op = b.op(std::move(name), OpKind::ResidualAdd, {x, y}, {sum});
  op.grad_aliases = {{x, sum}, {y, sum}};
  return sum;
}

TensorId all_to_all(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape,
                    std::int64_t ranks) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, std::move(shape));
  Collective exchange{CollectiveKind::AllToAll, Group::Cp, ranks, b.at(x).bytes()};
  Op& op = b.op(std::move(name), OpKind::AllToAll, {x}, {y});
  op.collectives = {exchange};
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}, .collectives = {exchange}});
  return y;
}

} // namespace gdn::model
