#include "model/kinds/gdn2.h"
#include "model/kinds/gdn2_pre.h"
#include "model/native/gdn.h"
#include "model/native/gdn_parts.h"

namespace gdn::model::native {

TensorId gdn2_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const GdnAttr a = gdn_attributes(model, run, d);
  const std::int64_t R = d.rule_tokens, hk = a.key_heads, hv = a.value_heads, dk = a.key_dim, dv = a.value_dim;
  constexpr GradientStorage kSlice = GradientStorage::Slice;

  TensorId proj = project(b, x, (4 * s.qk() + 3 * s.v()) / d.tp, model, run, d);             // [R, q | k | v | z | f | b | w]
  std::int64_t at = 0;
  auto section = [&](const char* name, std::vector<std::int64_t> shape) {
    TensorId t = b.view(name, proj, at, std::move(shape), kSlice);
    at += b.at(t).cols();
    return t;
  };
  TensorId qkv = section("qkv", {R, 2 * hk * dk + hv * dv});
  TensorId z = section("z", {R, hv, dv});
  TensorId f = section("f_logits", {R, hk, dk});
  TensorId erase = section("b_logits", {R, hk, dk});
  TensorId write = section("w_logits", {R, hv, dv});
  Gdn2Inputs pre = gdn2_pre(b, "gdn2_pre", qkv, f, erase, write, front_end_params(b, hk, hk * dk, a, d), a);
  GdnAttr rule = a;
  rule.normalise = false; // the op before it has
  TensorId o = gdn2_rule(b, "rule", pre.q, pre.k, pre.v, {pre.g, pre.b, pre.w}, rule);  // [R, Hv, dv]
  return project_out(b, o, z, model, run, d);                                           // [N_sp, h]
}

} // namespace gdn::model::native
