#include "model/native/gdn.h"

#include "model/kinds/gdn.h"
#include "model/kinds/gdn_pre.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"

namespace gdn::model::native {

TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const std::int64_t R = d.rule_tokens, shard = d.tp * d.cp;
  const std::int64_t hk = s.key_heads / shard, hv = s.value_heads / shard, dk = s.key_head_dim, dv = s.value_head_dim;
  const std::int64_t in_width = (2 * s.qk() + 2 * s.v() + 2 * s.value_heads) / d.tp;
  const std::int64_t qkv_width = 2 * hk * dk + hv * dv;
  const GdnAttr attr{.key_heads = hk, .value_heads = hv, .key_dim = dk, .value_dim = dv, .kernel = s.conv_kernel,
                     .conv_bias = s.conv_bias, .normalise = s.use_qk_l2norm && run.l2norm != config::L2Norm::Off,
                     .grouped = true, .negative_eigenvalues = s.negative_eigenvalues, .eps = 1e-6};
  GdnAttr rule = attr;
  rule.normalise = false; // the op before it has
  const LinearAttr column{TensorParallel::Column, d.tp, d.sp, s.bias}, row{TensorParallel::Row, d.tp, d.sp, s.bias};
  constexpr GradientStorage kSlice = GradientStorage::Slice;

  TensorId xn = rms_norm(b, "input_norm", x, {"gdn.in_proj.layer_norm", d.hidden, d.dtype},
                         {model.norm_eps, model.zero_centred_norm}, "xn").y;               // [N_sp, h]
  TensorId proj = linear(b, "in_proj", xn, {"gdn.in_proj", in_width * d.hidden, d.dtype}, in_width, column,
                         "proj");                                                          // [N, q | k | v | z | beta | alpha]
  if (d.cp > 1) proj = all_to_all(b, "cp2hp", proj, "proj_hp", {R, in_width / d.cp}, d.cp);
  TensorId qkv = b.view("qkv", proj, 0, {R, qkv_width}, kSlice);
  TensorId z = b.view("z", proj, qkv_width, {R, hv, dv}, kSlice);
  TensorId beta_logits = b.view("beta_logits", proj, qkv_width + hv * dv, {R, hv}, kSlice);
  TensorId alpha = b.view("alpha", proj, qkv_width + hv * dv + hv, {R, hv}, kSlice);
  GdnPreOutputs pre = gdn_pre(b, "gdn_pre", qkv, beta_logits, alpha,
                              {{"gdn.conv1d", qkv_width * s.conv_kernel, d.dtype},
                               {"gdn.A_log", hv, DType::FP32}, {"gdn.dt_bias", hv, DType::FP32}}, attr);
  TensorId o = gated_delta_rule(b, "rule", pre.q, pre.k, pre.v, pre.g, pre.beta, rule).o;  // [R, Hv, dv]
  TensorId norm_out = gated_norm(b, "gated_norm", o, z, {"gdn.out_norm", dv, d.dtype}, attr, false, "norm_out");
  if (d.cp > 1) norm_out = all_to_all(b, "hp2cp", norm_out, "norm_out_cp", {d.tokens, hv * d.cp, dv}, d.cp);
  return linear(b, "out_proj", norm_out, {"gdn.out_proj", (s.v() / d.tp) * d.hidden, d.dtype}, d.hidden, row, "out");
}

} // namespace gdn::model::native
