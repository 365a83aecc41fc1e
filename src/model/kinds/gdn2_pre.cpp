#include "model/kinds/gdn2_pre.h"

namespace gdn::model {

Gdn2Inputs gdn2_pre(Builder& b, std::string name, TensorId qkv, TensorId f, TensorId erase, TensorId write,
                    GdnPreParams params, const GdnAttr& attr) {
  const std::int64_t rows = b.at(qkv).rows(), hk = attr.key_heads, hv = attr.value_heads;
  const DType dtype = b.at(qkv).dtype;
  Gdn2Inputs out;
  out.q = b.tensor("q", dtype, {rows, hk, attr.key_dim});
  out.k = b.tensor("k", dtype, {rows, hk, attr.key_dim});
  out.v = b.tensor("v", dtype, {rows, hv, attr.value_dim});
  out.g = b.tensor("g", DType::FP32, {rows, hk, attr.key_dim});
  out.b = b.tensor("b", dtype, {rows, hk, attr.key_dim});
  out.w = b.tensor("w", dtype, {rows, hv, attr.value_dim});
  Op& op = b.op(std::move(name), OpKind::Gdn2Pre, {qkv, f, erase, write}, {out.q, out.k, out.v, out.g, out.b, out.w}, attr);
  gdn_pre_backward(b, op, std::move(params), attr);
  return out;
}

} // namespace gdn::model
