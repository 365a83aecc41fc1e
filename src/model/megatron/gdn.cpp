#include "model/megatron/gdn.h"

#include "model/kinds/gdn.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"

namespace gdn::model::megatron {

// Row by row the table of megatron-core's gated_delta_net forward; what backward keeps follows from
// the steps of each kind. R = s*b rows after the exchange (N at cp = 1), heads are this rank's.
TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const std::int64_t R = d.rule_tokens;
  const std::int64_t shard = d.tp * d.cp;
  const std::int64_t hk = s.key_heads / shard, hv = s.value_heads / shard, dk = s.key_head_dim, dv = s.value_head_dim;
  const std::int64_t in_width = (2 * s.qk() + 2 * s.v() + 2 * s.value_heads) / d.tp; // D / tp
  const bool kernel_norm = s.use_qk_l2norm && run.l2norm == config::L2Norm::Kernel;
  const bool caller_norm = s.use_qk_l2norm && run.l2norm == config::L2Norm::Caller;
  GdnAttr attr{.key_heads = hk, .value_heads = hv, .key_dim = dk, .value_dim = dv, .kernel = s.conv_kernel,
               .conv_bias = s.conv_bias, .normalise = kernel_norm,
               .negative_eigenvalues = s.negative_eigenvalues, .deterministic = run.deterministic, .eps = 1e-6};
  const LinearAttr column{TensorParallel::Column, d.tp, d.sp, s.bias}, row{TensorParallel::Row, d.tp, d.sp, s.bias};
  const NormAttr norm{model.norm_eps, model.zero_centred_norm};

  TensorId h = x;
  if (run.build == config::Build::Te) // fused into in_proj's module; saves x, its output and rstd
    h = rms_norm(b, "in_proj.layer_norm", x, {"gdn.in_proj.layer_norm", d.hidden, d.dtype}, norm, "ln_out").y;
  TensorId proj = linear(b, "in_proj", h, {"gdn.in_proj", in_width * d.hidden, d.dtype}, in_width, column, "proj");
  if (d.cp > 1) proj = all_to_all(b, "cp2hp", proj, "proj_hp", {R, in_width / d.cp}, d.cp);
  auto parts = split(b, "split", proj, {{"qkv", {R, attr.key_heads * dk * 2 + hv * dv}},
                                        {"z_view", {R, hv, dv}},
                                        {"beta_view", {R, hv}},
                                        {"alpha_view", {R, hv}}});
  const TensorId qkv = parts[0], z_view = parts[1], beta_view = parts[2], alpha_view = parts[3];
  TensorId conv = conv_silu(b, "conv1d", qkv, {"gdn.conv1d", b.at(qkv).cols() * s.conv_kernel, d.dtype}, attr, "conv");
  auto conv_parts = split(b, "split_qkv", conv, {{"qk_view", {R, 2 * hk, dk}}, {"v_view", {R, hv, dv}}});
  TensorId qk = conv_parts[0];
  if (caller_norm) qk = l2_norm(b, "l2norm", qk, attr, "qk_norm").y;
  auto heads = split(b, "split_qk", qk, {{"q_view", {R, hk, dk}}, {"k_view", {R, hk, dk}}});
  TensorId q = expand_heads(b, "expand_q", heads[0], hv, dk, "q");
  TensorId k = expand_heads(b, "expand_k", heads[1], hv, dk, "k");
  TensorId v = copy(b, "copy_v", conv_parts[1], "v");
  TensorId z = copy(b, "copy_z", z_view, "z");
  GateOutputs gate = gates(b, "gates", beta_view, alpha_view, {"gdn.A_log", hv, d.dtype}, {"gdn.dt_bias", hv, d.dtype}, attr);
  const bool factored = run.revision.has("gdn_qkv") || run.revision.has("gdn_in_proj_conv");
  if (factored) b.hold_frame_until_here(conv); // the front end is a function of its own
  RuleOutputs rule = gated_delta_rule(b, "rule", q, k, v, gate.g, gate.beta, attr);
  TensorId gated = gated_norm(b, "gated_norm", rule.o, z, {"gdn.out_norm", dv, d.dtype}, attr,
                              run.build == config::Build::Te, "gated");
  TensorId norm_out = copy(b, "hp2cp.transpose", gated, "norm_out_hp");
  if (d.cp > 1) norm_out = all_to_all(b, "hp2cp", norm_out, "norm_out", {d.tokens, hv * d.cp, dv}, d.cp);
  TensorId out = linear(b, "out_proj", norm_out, {"gdn.out_proj", (s.v() / d.tp) * d.hidden, d.dtype}, d.hidden, row, "out");
  if (!factored) b.hold_frame_until_here(conv); // a local of the module's own forward
  b.hold_frame_until_here(gate.g);
  return out;
}

} // namespace gdn::model::megatron
