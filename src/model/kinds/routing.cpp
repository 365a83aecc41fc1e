#include "model/kinds/routing.h"

namespace gdn::model {

TopKOutputs top_k(Builder& b, std::string name, TensorId logits, const MoeAttr& attr, const ParamRef* expert_bias) {
  const std::int64_t tokens = b.at(logits).rows();
  TopKOutputs out{b.tensor("weights", DType::FP32, {tokens, attr.top_k}),
                  b.statistic("experts", DType::Int32, {tokens, attr.top_k})};
  Op& op = b.op(std::move(name), OpKind::TopK, {logits}, {out.weights, out.experts}, attr);
  if (expert_bias) {
    op.params = {*expert_bias};
    op.params[0].trainable = false;
  }
  const bool softmax_of_chosen = !attr.sigmoid && attr.renormalise;
  op.steps.push_back({.name = "backward", .reads = {softmax_of_chosen ? out.weights : logits, out.experts},
                      .grad_reads = {out.weights}, .grad_writes = {logits}});
  return out;
}

SortOutputs sort_slots(Builder& b, std::string name, const TopKOutputs& routing, std::int64_t rows, const MoeAttr& attr) {
  SortOutputs out{b.statistic("row_map", DType::Int32, b.at(routing.experts).shape),
                  b.statistic("offsets", DType::Int32, {attr.experts + 1}), b.tensor("row_prob", DType::FP32, {rows}),
                  b.statistic("expert_counts", DType::Int32, {attr.experts})};
  Op& op = b.op(std::move(name), OpKind::Sort, {routing.weights, routing.experts},
                {out.row_map, out.offsets, out.row_prob, out.counts}, attr);
  op.steps.push_back({.name = "backward", .reads = {out.row_map}, .grad_reads = {out.row_prob}, .grad_writes = {routing.weights}});
  return out;
}

void router_loss(Builder& b, std::string name, TensorId logits, TensorId counts, const MoeAttr& attr) {
  Op& op = b.op(std::move(name), OpKind::RouterLoss, {logits, counts}, {}, attr);
  op.effects = true;
  if (attr.aux_coeff > 0 || attr.z_coeff > 0)
    op.steps.push_back({.name = "backward", .reads = {logits, counts}, .grad_writes = {logits}});
}

TensorId gather_rows(Builder& b, std::string name, TensorId x, TensorId row_map, std::int64_t rows, const MoeAttr& attr,
                     std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {rows, b.at(x).cols()});
  Op& op = b.op(std::move(name), OpKind::Gather, {x, row_map}, {y}, attr);
  op.steps.push_back({.name = "backward", .reads = {row_map}, .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

TensorId shared_score(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t tp, bool sequence_parallel,
                      std::string out) {
  const bool gathers = tp > 1 && sequence_parallel;
  TensorId score = b.tensor(std::move(out), DType::FP32, {b.at(x).rows() * (gathers ? tp : 1)});
  const Bytes bytes = b.at(score).bytes();
  Op& op = b.op(std::move(name), OpKind::SharedScore, {x}, {score}, LinearAttr{.tp = tp, .sequence_parallel = sequence_parallel});
  op.params = {std::move(weight)};
  Step backward{.name = "backward", .reads = {x, score}, .grad_reads = {score}, .grad_writes = {x}, .param_grads = {0}};
  if (gathers) op.collectives = {{CollectiveKind::AllGather, Group::Tp, tp, bytes}};
  if (tp > 1) backward.collectives = {{gathers ? CollectiveKind::ReduceScatter : CollectiveKind::AllReduce, Group::Tp, tp, bytes}};
  op.steps = {std::move(backward)};
  return score;
}

} // namespace gdn::model
