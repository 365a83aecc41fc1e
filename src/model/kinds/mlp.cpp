#include "model/kinds/mlp.h"

namespace gdn::model {

TensorId swiglu(Builder& b, std::string name, TensorId fc1, std::string out) {
  TensorId act = b.tensor(std::move(out), b.at(fc1).dtype, {b.at(fc1).rows(), b.at(fc1).cols() / 2});
  Op& op = b.op(std::move(name), OpKind::SwiGlu, {fc1}, {act});
  op.steps.push_back({.name = "backward", .reads = {fc1}, .grad_reads = {act}, .grad_writes = {fc1}});
  return act;
}

TensorId shared_gate(Builder& b, std::string name, TensorId x, TensorId y, ParamRef weight, std::string out) {
  TensorId gated = b.tensor(std::move(out), b.at(y).dtype, b.at(y).shape);
  TensorId score = b.statistic("sh_score", b.at(y).dtype, {b.at(y).rows()});
  Op& op = b.op(std::move(name), OpKind::SharedGate, {x, y}, {gated, score});
  op.params = {std::move(weight)};
  op.steps.push_back({.name = "backward", .reads = {x, y, score}, .grad_reads = {gated}, .grad_writes = {y, x},
                      .param_grads = {0}});
  return gated;
}

} // namespace gdn::model
