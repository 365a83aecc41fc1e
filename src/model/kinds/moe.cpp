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

Exchange expert_exchange(std::int64_t ep, std::int64_t etp, std::int64_t sent, std::int64_t received, Bytes row) {
  Exchange e;
  if (ep > 1) {
    e.out.push_back({CollectiveKind::AllToAll, Group::Ep, ep, sent * row});
    e.back.push_back({CollectiveKind::AllToAll, Group::Ep, ep, sent * row});
  }
  if (etp > 1) {
    e.out.push_back({CollectiveKind::AllGather, Group::Etp, etp, received * row});
    e.back.insert(e.back.begin(), {CollectiveKind::ReduceScatter, Group::Etp, etp, received * row});
  }
  return e;
}

RowsOutputs dispatch(Builder& b, std::string name, TensorId rows, TensorId prob, std::int64_t received,
                     const std::vector<Collective>& forward, const std::vector<Collective>& backward,
                     const MoeAttr& attr, TensorId offsets) {
  RowsOutputs out{b.tensor("e_in", b.at(rows).dtype, {received, b.at(rows).cols()}),
                  b.tensor("e_prob", b.at(prob).dtype, {received})};
  std::vector<TensorId> inputs{rows, prob}, outputs{out.rows, out.prob}, sizes;
  if (offsets >= 0) {
    std::int64_t ranks = 1;
    for (const Collective& c : forward) ranks *= c.ranks;
    out.offsets = b.statistic("e_offsets", DType::Int32, {attr.local_experts + 1});
    out.counts = b.statistic("e_counts", DType::Int32, {ranks, attr.local_experts});
    inputs.push_back(offsets);
    outputs.insert(outputs.end(), {out.offsets, out.counts});
    sizes = {offsets, out.counts};
  }
  Op& op = b.op(std::move(name), OpKind::Dispatch, std::move(inputs), std::move(outputs), attr);
  op.collectives = forward;
  op.steps.push_back({.name = "backward", .reads = std::move(sizes), .grad_reads = {out.rows, out.prob},
                      .grad_writes = {rows, prob}, .collectives = backward});
  return out;
}

TensorId combine(Builder& b, std::string name, TensorId rows, std::int64_t sent,
                 const std::vector<Collective>& forward, const std::vector<Collective>& backward, const MoeAttr& attr,
                 std::string out, const std::vector<TensorId>& sizes) {
  TensorId y = b.tensor(std::move(out), b.at(rows).dtype, {sent, b.at(rows).cols()});
  Op& op = b.op(std::move(name), OpKind::CombineDispatch, {rows}, {y}, attr);
  op.inputs.insert(op.inputs.end(), sizes.begin(), sizes.end());
  op.collectives = forward;
  op.steps.push_back({.name = "backward", .reads = sizes, .grad_reads = {y}, .grad_writes = {rows}, .collectives = backward});
  return y;
}

TensorId grouped_linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols,
                        const MoeAttr& attr, std::string out, TensorId offsets) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows(), out_cols});
  Op& op = b.op(std::move(name), OpKind::GroupedLinear, {x}, {y}, attr);
  op.params = {std::move(weight)};
  op.model_flops = 2.0 * static_cast<double>(b.at(x).rows()) * static_cast<double>(b.at(x).cols()) *
                   static_cast<double>(out_cols);
  Step dgrad{.name = "dgrad", .grad_reads = {y}, .grad_writes = {x}};
  Step wgrad{.name = "wgrad", .reads = {x}, .grad_reads = {y}, .param_grads = {0}};
  if (offsets < 0) {
    op.steps = {std::move(dgrad), std::move(wgrad)};
    return y;
  }
  op.inputs.push_back(offsets);
  dgrad.reads.push_back(offsets);
  wgrad.reads.push_back(offsets);
  op.steps = {std::move(wgrad), std::move(dgrad)};
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
