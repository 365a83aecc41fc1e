#include "model/native/gdn.h"

#include "model/kinds/gdn.h"
#include "model/kinds/gdn_pre.h"
#include "model/native/gdn_parts.h"

namespace gdn::model::native {

TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const GdnAttr a = gdn_attributes(model, run, d);
  const std::int64_t R = d.rule_tokens, hv = a.value_heads, dv = a.value_dim;
  const std::int64_t qkv_width = 2 * a.key_heads * a.key_dim + hv * dv;
  constexpr GradientStorage kSlice = GradientStorage::Slice;

  TensorId proj = project(b, x, (2 * s.qk() + 2 * s.v() + 2 * s.value_heads) / d.tp, model, run, d); // [R, q | k | v | z | beta | alpha]
  TensorId qkv = b.view("qkv", proj, 0, {R, qkv_width}, kSlice);
  TensorId z = b.view("z", proj, qkv_width, {R, hv, dv}, kSlice);
  TensorId beta_logits = b.view("beta_logits", proj, qkv_width + hv * dv, {R, hv}, kSlice);
  TensorId alpha = b.view("alpha", proj, qkv_width + hv * dv + hv, {R, hv}, kSlice);
  GdnPreOutputs pre = gdn_pre(b, "gdn_pre", qkv, beta_logits, alpha, front_end_params(b, hv, hv, a, d), a);
  GdnAttr rule = a;
  rule.normalise = false; // the op before it has
  TensorId o = gated_delta_rule(b, "rule", pre.q, pre.k, pre.v, pre.g, pre.beta, rule).o; // [R, Hv, dv]
  return project_out(b, o, z, model, run, d);                                           // [N_sp, h]
}

} // namespace gdn::model::native
