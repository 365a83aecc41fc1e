#include "model/kinds/ends.h"

#include "model/kinds/linear.h"

namespace gdn::model {

TensorId embedding(Builder& b, std::string name, TensorId ids, ParamRef weight, const EmbeddingShape& s, DType dtype,
                   std::string out) {
  const std::int64_t tokens = b.at(ids).rows();
  const Bytes full = tokens * s.hidden * size_of(dtype);
  TensorId y = b.tensor(out, dtype, {s.sequence_parallel ? tokens / s.tp : tokens, s.hidden});
  std::vector<TensorId> outputs{y};
  Step backward{.name = "wgrad", .reads = {ids}, .grad_reads = {y}, .param_grads = {0}};
  if (s.dropout) {
    outputs.push_back(b.statistic(out + "_mask", DType::Bool, b.at(y).shape));
    backward.reads.push_back(outputs.back());
  }
  Op& op = b.op(std::move(name), OpKind::Embedding, {ids}, outputs, RowsAttr{s.hidden});
  op.params = {std::move(weight)};
  if (s.tp > 1) {
    op.collectives = {{s.sequence_parallel ? CollectiveKind::ReduceScatter : CollectiveKind::AllReduce, Group::Tp, s.tp, full}};
    if (s.sequence_parallel) backward.collectives = {{CollectiveKind::AllGather, Group::Tp, s.tp, full}};
  }
  op.steps = {std::move(backward)};
  return y;
}

TensorId lm_head(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t vocab, std::int64_t tp,
                 bool sequence_parallel, LossForm form, std::string out) {
  TensorId y = linear(b, std::move(name), x, std::move(weight), vocab, {TensorParallel::Column, tp, sequence_parallel, false},
                      std::move(out));
  b.list().ops.back().kind = OpKind::LmHead;
  Tensor& logits = b.list().tensors[static_cast<size_t>(y)];
  b.list().storages[static_cast<size_t>(logits.storage)].category = Category::Logits;
  if (form == LossForm::Overwrite) logits.gradient = GradientStorage::Overwrite;
  return y;
}

TensorId cross_entropy(Builder& b, std::string name, TensorId logits, TensorId labels, const LossAttr& attr,
                       std::int64_t tp, std::string out) {
  const std::int64_t tokens = b.at(logits).rows();
  const Bytes column = tokens * 4; // one fp32 a token
  TensorId loss = b.tensor(out, DType::FP32, {tokens});
  std::vector<TensorId> outputs{loss}, saved;
  switch (attr.form) {
  case LossForm::Softmax: {
    TensorId softmax = b.tensor(out + "_softmax", DType::FP32, b.at(logits).shape, Category::Logits);
    b.list().tensors.back().differentiable = false;
    outputs.insert(outputs.end(), {softmax, b.statistic(out + "_label_mask", DType::Bool, {tokens}),
                                   b.statistic(out + "_label_ids", DType::Int64, {tokens})});
    saved.assign(outputs.begin() + 1, outputs.end());
    break;
  }
  case LossForm::Overwrite: {
    TensorId gradient = b.view(out + "_dlogits", logits, 0, b.at(logits).shape, GradientStorage::Own);
    b.list().tensors.back().differentiable = false;
    outputs.push_back(gradient);
    saved = {gradient};
    break;
  }
  case LossForm::Logits:
    outputs.push_back(b.statistic(out + "_lse", DType::FP32, {tokens}));
    saved = {logits, labels, outputs.back()};
    break;
  }
  Op& op = b.op(std::move(name), OpKind::CrossEntropy, {logits, labels}, outputs, attr);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {loss}, .grad_writes = {logits}});
  if (tp > 1 && attr.form == LossForm::Overwrite) // row maximum, sum and label logit in one gather
    op.collectives = {{CollectiveKind::AllGather, Group::Tp, tp, 3 * column * tp}};
  else if (tp > 1)
    op.collectives.assign(3, {CollectiveKind::AllReduce, Group::Tp, tp, column});
  return loss;
}

TensorId linear_cross_entropy(Builder& b, std::string name, TensorId x, TensorId labels, ParamRef weight,
                              const LossAttr& attr, std::int64_t tp, bool sequence_parallel, std::string out) {
  const std::int64_t tokens = b.at(labels).rows(), hidden = b.at(x).cols();
  const Bytes input = tokens * hidden * size_of(b.at(x).dtype);
  TensorId loss = b.tensor(out, DType::FP32, {tokens});
  TensorId lse = b.statistic(out + "_lse", DType::FP32, {tokens});
  Op& op = b.op(std::move(name), OpKind::LinearCrossEntropy, {x, labels}, {loss, lse}, attr);
  op.params = {std::move(weight)};
  Step backward{.name = "backward", .reads = {x, labels, lse}, .grad_reads = {loss}, .grad_writes = {x}, .param_grads = {0}};
  if (tp > 1) {
    if (sequence_parallel) op.collectives = {{CollectiveKind::AllGather, Group::Tp, tp, input}};
    op.collectives.insert(op.collectives.end(), 3, {CollectiveKind::AllReduce, Group::Tp, tp, tokens * 4});
    if (sequence_parallel)
      backward.collectives = {{CollectiveKind::AllGather, Group::Tp, tp, input},
                              {CollectiveKind::ReduceScatter, Group::Tp, tp, input}};
    else
      backward.collectives = {{CollectiveKind::AllReduce, Group::Tp, tp, input}};
  }
  op.model_flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(hidden) * static_cast<double>(attr.vocab);
  op.steps = {std::move(backward)};
  return loss;
}

void loss_sum(Builder& b, std::string name, const std::vector<TensorId>& losses) {
  Op& op = b.op(std::move(name), OpKind::LossSum, losses, {});
  op.steps.push_back({.name = "backward", .grad_writes = losses});
}

} // namespace gdn::model
