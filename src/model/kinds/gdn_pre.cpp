#include "model/kinds/gdn_pre.h"

namespace gdn::model {

GdnPreOutputs gdn_pre(Builder& b, std::string name, TensorId qkv, TensorId beta_logits, TensorId alpha,
                      GdnPreParams params, const GdnAttr& attr) {
  const std::int64_t rows = b.at(qkv).rows();
  const DType dtype = b.at(qkv).dtype;
  GdnPreOutputs out;
  out.q = b.tensor("q", dtype, {rows, attr.key_heads, attr.key_dim});
  out.k = b.tensor("k", dtype, {rows, attr.key_heads, attr.key_dim});
  out.v = b.tensor("v", dtype, {rows, attr.value_heads, attr.value_dim});
  out.g = b.tensor("g", DType::FP32, {rows, attr.value_heads});
  out.beta = b.tensor("beta", DType::FP32, {rows, attr.value_heads});
  Op& op = b.op(std::move(name), OpKind::GdnPre, {qkv, beta_logits, alpha}, {out.q, out.k, out.v, out.g, out.beta}, attr);
  gdn_pre_backward(b, op, std::move(params), attr);
  return out;
}

void gdn_pre_backward(const Builder& b, Op& op, GdnPreParams params, const GdnAttr& attr) {
  const Tensor& qkv = b.at(op.inputs[0]);
  op.params = {std::move(params.conv), std::move(params.a_log), std::move(params.dt_bias)};
  Step backward{.name = "backward", .reads = op.inputs, .grad_reads = op.outputs, .grad_writes = op.inputs, .param_grads = {0, 1, 2}};
  if (attr.conv_bias) {
    ParamRef bias = op.params[0];
    bias.name += ".bias";
    bias.elements /= attr.kernel;
    op.params.push_back(bias);
    backward.param_grads.push_back(3);
  }
  op.model_flops = 2.0 * static_cast<double>(qkv.elements()) * static_cast<double>(attr.kernel);
  op.steps = {std::move(backward)};
}

} // namespace gdn::model
