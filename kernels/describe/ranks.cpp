#include "kernels/describe/ranks.h"

#include <algorithm>

#include "kernels/attention/core.h"

namespace gdn::kernels {

using namespace model;

namespace {

// A matrix where the next one may begin.
Bytes room(std::int64_t rows, std::int64_t cols, Bytes element) { return round_up(rows * cols * element, 256); }
Bytes room(const Tensor& t) { return round_up(t.bytes(), 256); }

bool exchanges(const Op& op, int step) {
  return !(step < 0 ? op.collectives : op.steps[static_cast<size_t>(step)].collectives).empty();
}

// The gradient of x before it is summed over ranks and added to what is there.
Bytes linear_room(const OpList& list, const Op& op, int step) {
  const LinearAttr& a = std::get<LinearAttr>(op.attr);
  const bool summed = step >= 0 && a.tp > 1 && a.mode == TensorParallel::Column && !a.sequence_parallel && !op.steps[static_cast<size_t>(step)].grad_writes.empty();
  return summed ? room(list.tensor(op.inputs[0])) : 0;
}

// Ids as rows of this rank's part of the table; outputs of all rows before they are summed, or their gradient.
Bytes embedding(const OpList& list, const Op& op) {
  if (op.collectives.empty()) return 0;
  const Tensor &ids = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
  return room(ids.rows(), 1, 8) + (y.rows() < ids.rows() ? room(ids.rows(), y.cols(), size_of(y.dtype)) : 0);
}

// Per token: maximum, sum, logit of the label and one more; the same of all ranks, where they are gathered.
Bytes loss_parts(const Op& op, std::int64_t tokens) {
  const Collective& last = op.collectives.back();
  return 4 * room(tokens, 1, 4) + (last.kind == CollectiveKind::AllGather ? room(3 * tokens, 1, 4) + room(3 * tokens * last.ranks, 1, 4) : 0);
}
Bytes cross_entropy_room(const OpList& list, const Op& op, int step) {
  if (op.collectives.empty()) return 0;
  const std::int64_t tokens = list.tensor(op.outputs[0]).rows();
  const Bytes labels = room(tokens, 1, 8);
  return step < 0 ? labels + loss_parts(op, tokens) : std::get<LossAttr>(op.attr).form == LossForm::Logits ? labels : 0;
}
Bytes linear_cross_entropy_room(const OpList& list, const Op& op, int step) {
  if (op.collectives.empty()) return 0;
  const Tensor& x = list.tensor(op.inputs[0]);
  const std::int64_t tokens = list.tensor(op.outputs[0]).rows();
  return room(tokens, 1, 8) + (step < 0 ? loss_parts(op, tokens) : room(tokens, x.cols(), size_of(x.dtype)));
}

// Rows at home and those of the other ranks, their places, and who sends how many.
Bytes expert_rows(const OpList& list, const Op& op) {
  if (op.collectives.empty()) return 0;
  std::int64_t ep = 1, etp = 1;
  for (const Collective& c : op.collectives) (c.group == Group::Ep ? ep : etp) = c.ranks;
  const Tensor &in = list.tensor(op.inputs[0]), &out = list.tensor(op.outputs[0]);
  const bool dispatch = op.kind == OpKind::Dispatch;
  const std::int64_t home = dispatch ? in.rows() : out.rows(), bound = dispatch ? out.rows() : in.rows();
  const Bytes element = size_of(in.dtype);
  return room(home, in.cols(), element) + room(bound, in.cols(), element) + (etp > 1 ? room(etp * bound, in.cols(), element) : 0) +
         room(bound, 1, 4) + room(ep * etp * std::get<MoeAttr>(op.attr).local_experts, 3, 4);
}

// Keys and values of all tokens, and what came from whom; this rank's queries at their places among all tokens,
// where the kernels find them. Backward: the same of the gradients.
Bytes attention(const OpList& list, const Op& op, int step) {
  if (op.collectives.empty()) return 0;
  const AttentionAttr& a = std::get<AttentionAttr>(op.attr);
  const std::int64_t local = list.tensor(op.inputs[0]).elements() / (a.heads * a.head_dim), all = local * op.collectives[0].ranks;
  const Bytes q = room(all, a.heads * a.head_dim, 2), kv = room(all, a.kv_heads * a.head_dim, 2);
  const Bytes forward = 2 * kv + room(2 * all, a.kv_heads * a.head_dim, 2) + 2 * q + room(all, a.heads, 4);
  return step < 0 ? forward : forward + 2 * q + 2 * kv + attention_backward_scratch(all, std::max(a.sequences, ceil_div(all, kChunk)), a.heads);
}

// Parameters that hold the heads of all context-parallel ranks: this rank's, and their gradient in fp32.
Bytes slice(const Op& op, size_t parameter, std::int64_t elements, int step) {
  const ParamRef& p = op.params[parameter];
  if (p.elements == elements) return 0;
  return room(elements, 1, size_of(p.dtype)) + (step < 0 ? 0 : room(elements, 1, 4));
}
Bytes slices(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const std::int64_t columns = list.tensor(op.inputs[0]).cols();
  switch (op.kind) {
  case OpKind::Conv:
  case OpKind::ConvSilu: return slice(op, 0, columns * a.kernel, step) + (op.params.size() > 1 ? slice(op, 1, columns, step) : 0);
  case OpKind::Gates: return slice(op, 0, a.value_heads, step) + slice(op, 1, a.value_heads, step);
  case OpKind::Gdn2Gates: return slice(op, 0, columns / a.key_dim, step) + slice(op, 1, columns, step);
  default: break;
  }
  const bool gdn2 = op.kind == OpKind::Gdn2Pre;
  return slice(op, 0, columns * a.kernel, step) + slice(op, 1, gdn2 ? a.key_heads : a.value_heads, step) +
         slice(op, 2, gdn2 ? a.key_heads * a.key_dim : a.value_heads, step) + (op.params.size() > 3 ? slice(op, 3, columns, step) : 0);
}

} // namespace

Bytes ranks_scratch(const OpList& list, const Op& op, int step) {
  switch (op.kind) {
  case OpKind::Linear:
  case OpKind::LmHead: return linear_room(list, op, step);
  case OpKind::Embedding: return embedding(list, op);
  case OpKind::CrossEntropy: return cross_entropy_room(list, op, step);
  case OpKind::LinearCrossEntropy: return linear_cross_entropy_room(list, op, step);
  case OpKind::ReduceScatter: return step < 0 ? 0 : room(list.tensor(op.inputs[0]));
  case OpKind::SharedScore: return step >= 0 && exchanges(op, step) ? room(list.tensor(op.outputs[0])) : 0;
  case OpKind::Dispatch:
  case OpKind::CombineDispatch: return expert_rows(list, op);
  case OpKind::CoreAttention: return attention(list, op, step);
  case OpKind::Conv:
  case OpKind::ConvSilu:
  case OpKind::Gates:
  case OpKind::GdnPre:
  case OpKind::Gdn2Gates:
  case OpKind::Gdn2Pre: return slices(list, op, step);
  default: return 0;
  }
}

} // namespace gdn::kernels
