#include "model/kinds/moe.h"

namespace gdn::model {

RouteOutputs route(Builder& b, std::string name, TensorId logits, const MoeAttr& attr, std::string pin) {
  const std::int64_t tokens = b.at(logits).rows();
  // Weights that sum to 1 are a softmax over the chosen logits alone: k scores instead of E.
  const std::int64_t scores = !attr.sigmoid && attr.renormalise ? attr.top_k : attr.experts;
  TensorId probs = b.tensor("probs", b.at(logits).dtype, {tokens, attr.experts});
  TensorId map = b.statistic("map", DType::Bool, {tokens, attr.experts});
  std::vector<TensorId> saved{b.statistic("scores", DType::FP32, {tokens, scores}),
                              b.statistic("top_indices", DType::Int64, {tokens, attr.top_k}),
                              b.statistic("scatter_indices", DType::Int64, {tokens, attr.top_k})};
  if (attr.aux_coeff > 0) saved.push_back(b.statistic("aux_scores", DType::FP32, {tokens, attr.experts}));
  std::vector<TensorId> outputs{probs, map};
  outputs.insert(outputs.end(), saved.begin(), saved.end());
  if (attr.z_coeff > 0) saved.push_back(logits);
  Op& op = b.op(std::move(name), OpKind::Router, {logits}, outputs, attr);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {probs}, .grad_writes = {logits}});
  if (!pin.empty()) op.pins = {{probs, pin}, {map, pin}};
  return {probs, map};
}

PermuteOutputs permute(Builder& b, std::string name, TensorId x, const RouteOutputs& routing, std::int64_t rows,
                       bool fused, const MoeAttr& attr) {
  const std::int64_t tokens = b.at(x).rows();
  TensorId out = b.tensor("permuted", b.at(x).dtype, {rows, b.at(x).cols()});
  TensorId prob = b.tensor("permuted_prob", b.at(routing.probs).dtype, {rows});
  TensorId row_map = fused ? b.statistic("row_map", DType::Int32, {tokens, 2 * attr.experts + 1})
                           : b.statistic("row_map", DType::Int64, {tokens, attr.top_k});
  Op& op = b.op(std::move(name), OpKind::Permute, {x, routing.probs, routing.map}, {out, prob, row_map}, attr);
  op.steps.push_back({.name = "backward", .reads = {row_map}, .grad_reads = {out, prob},
                      .grad_writes = {x, routing.probs}});
  return {out, prob, row_map};
}

RowsOutputs dispatch(Builder& b, std::string name, TensorId rows, TensorId prob, std::int64_t received,
                     const std::vector<Collective>& forward, const std::vector<Collective>& backward,
                     const MoeAttr& attr) {
  TensorId out = b.tensor("e_in", b.at(rows).dtype, {received, b.at(rows).cols()});
  TensorId out_prob = b.tensor("e_prob", b.at(prob).dtype, {received});
  Op& op = b.op(std::move(name), OpKind::Dispatch, {rows, prob}, {out, out_prob}, attr);
  op.collectives = forward;
  op.steps.push_back({.name = "backward", .grad_reads = {out, out_prob}, .grad_writes = {rows, prob},
                      .collectives = backward});
  return {out, out_prob};
}

TensorId combine(Builder& b, std::string name, TensorId rows, std::int64_t sent,
                 const std::vector<Collective>& forward, const std::vector<Collective>& backward, const MoeAttr& attr,
                 std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(rows).dtype, {sent, b.at(rows).cols()});
  Op& op = b.op(std::move(name), OpKind::CombineDispatch, {rows}, {y}, attr);
  op.collectives = forward;
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {rows}, .collectives = backward});
  return y;
}

TensorId grouped_linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols,
                        const MoeAttr& attr, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows(), out_cols});
  Op& op = b.op(std::move(name), OpKind::GroupedLinear, {x}, {y}, attr);
  op.params = {std::move(weight)};
  op.model_flops = 2.0 * static_cast<double>(b.at(x).rows()) * static_cast<double>(b.at(x).cols()) *
                   static_cast<double>(out_cols);
  op.steps = {{.name = "dgrad", .grad_reads = {y}, .grad_writes = {x}},
              {.name = "wgrad", .reads = {x}, .grad_reads = {y}, .param_grads = {0}}};
  return y;
}

TensorId swiglu_prob(Builder& b, std::string name, TensorId fc1, TensorId prob, std::string out) {
  TensorId act = b.tensor(std::move(out), b.at(fc1).dtype, {b.at(fc1).rows(), b.at(fc1).cols() / 2});
  Op& op = b.op(std::move(name), OpKind::SwiGluProb, {fc1, prob}, {act});
  op.steps.push_back({.name = "backward", .reads = {fc1, prob}, .grad_reads = {act}, .grad_writes = {fc1, prob}});
  return act;
}

TensorId unpermute(Builder& b, std::string name, TensorId rows, TensorId row_map, std::int64_t tokens,
                   const MoeAttr& attr, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(rows).dtype, {tokens, b.at(rows).cols()});
  Op& op = b.op(std::move(name), OpKind::Unpermute, {rows, row_map}, {y}, attr);
  op.steps.push_back({.name = "backward", .reads = {row_map}, .grad_reads = {y}, .grad_writes = {rows}});
  return y;
}

} // namespace gdn::model
