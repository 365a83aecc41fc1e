#include "model/kinds/gdn2.h"

#include "model/kinds/gdn.h"

namespace gdn::model {

Gdn2GateOutputs gdn2_gates(Builder& b, std::string name, TensorId f, TensorId erase, TensorId write, ParamRef a_log,
                           ParamRef dt_bias, const GdnAttr& attr) {
  const std::int64_t rows = b.at(f).rows(), heads = attr.grouped ? attr.key_heads : attr.value_heads;
  const DType dtype = b.at(f).dtype;
  Gdn2GateOutputs out{b.tensor("g", DType::FP32, {rows, heads, attr.key_dim}),
                      b.tensor("b", dtype, {rows, heads, attr.key_dim}),
                      b.tensor("w", dtype, {rows, attr.value_heads, attr.value_dim})};
  std::vector<TensorId> outputs{out.g, out.b, out.w}, saved{f, erase, write};
  if (!attr.compiled) { // as GDN's, at Hk heads
    outputs.push_back(b.statistic("softplus_in", DType::FP32, b.at(f).shape));
    outputs.push_back(b.statistic("softplus_out", DType::FP32, b.at(f).shape));
    saved = {outputs[3], outputs[4], out.b, out.w};
  }
  Op& op = b.op(std::move(name), OpKind::Gdn2Gates, {f, erase, write}, outputs, attr);
  op.params = {std::move(a_log), std::move(dt_bias)};
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {out.g, out.b, out.w},
                      .grad_writes = {f, erase, write}, .param_grads = {0, 1}});
  return out;
}

TensorId gdn2_rule(Builder& b, std::string name, TensorId q, TensorId k, TensorId v, const Gdn2GateOutputs& gates,
                   const GdnAttr& attr) {
  const std::int64_t rows = b.at(v).rows(), hv = attr.value_heads;
  const DType dtype = b.at(v).dtype;
  TensorId o = b.tensor("o", dtype, {rows, hv, attr.value_dim});
  std::vector<TensorId> outputs{o}, saved;
  if (attr.deterministic) {
    saved = plain_rule_intermediates(b, attr);
    outputs.insert(outputs.end(), saved.begin(), saved.end());
  } else {
    if (!attr.grouped) outputs.push_back(b.statistic("g_cum", DType::FP32, {rows, hv, attr.key_dim}));
    outputs.insert(outputs.end(), {b.statistic("A", dtype, {rows, hv, 64}), b.statistic("A_qk", dtype, {rows, hv, 64})});
    saved = {q, k, v, gates.b, gates.w, gates.g};
    saved.insert(saved.end(), outputs.begin() + 1, outputs.end());
  }
  Op& op = b.op(std::move(name), OpKind::Gdn2Rule, {q, k, v, gates.g, gates.b, gates.w}, outputs, attr);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {o},
                      .grad_writes = {q, k, v, gates.g, gates.b, gates.w}});
  op.model_flops = 8.0 * static_cast<double>(rows * hv) * static_cast<double>(attr.value_dim * attr.value_dim);
  return o;
}

} // namespace gdn::model
