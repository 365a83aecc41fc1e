#include "model/kinds/attention_pre.h"

namespace gdn::model {

AttentionInputs attention_pre(Builder& b, std::string name, const AttentionInputs& in, std::optional<ParamRef> q_norm,
                              std::optional<ParamRef> k_norm, const AttentionAttr& attr) {
  const DType dtype = b.at(in.q).dtype;
  const std::int64_t rows = b.at(in.k).rows() / attr.kv_heads;
  AttentionInputs out{b.tensor("q", dtype, {rows, attr.heads, attr.head_dim}),
                      b.tensor("k", dtype, {rows, attr.kv_heads, attr.head_dim}),
                      b.tensor("v", dtype, {rows, attr.kv_heads, attr.head_dim})};
  Op& op = b.op(std::move(name), OpKind::AttentionPre, {in.q, in.k, in.v}, {out.q, out.k, out.v}, attr);
  Step backward{.name = "backward", .grad_reads = op.outputs, .grad_writes = op.inputs};
  if (attr.qk_norm != QkNorm::None) {
    op.params = {*q_norm, *k_norm};
    backward.reads = {in.q, in.k};
    backward.param_grads = {0, 1};
  }
  op.steps = {std::move(backward)};
  return out;
}

} // namespace gdn::model
