#include "model/megatron/gdn_parts.h"

#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/adapted_linear.h"

namespace gdn::model::megatron {

GdnAttr gdn_attributes(const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const std::int64_t shard = d.tp * d.cp;
  return {.key_heads = s.key_heads / shard, .value_heads = s.value_heads / shard, .key_dim = s.key_head_dim,
          .value_dim = s.value_head_dim, .kernel = s.conv_kernel, .conv_bias = s.conv_bias,
          .normalise = s.use_qk_l2norm && run.l2norm == config::L2Norm::Kernel,
          .negative_eigenvalues = s.negative_eigenvalues, .deterministic = run.deterministic, .eps = 1e-6,
          .compiled = run.settings.compiled,
          .chunks = d.chunks, .sequences = d.sequences};
}

TensorId project(Builder& b, TensorId x, std::int64_t width, const config::Model& model, const config::Run& run, const Dims& d) {
  TensorId h = x;
  if (run.build == config::Build::Te) // fused into in_proj's module; saves x, its output and rstd
    h = rms_norm(b, "in_proj.layer_norm", x, b.param("input_norm", d.hidden, d.dtype),
                 {model.norm_eps, model.zero_centred_norm}, "ln_out").y;
  TensorId proj = adapted_linear(b, "in_proj", "in_proj", h, b.param("gdn.in_proj", width * d.hidden, d.dtype), width,
                         {TensorParallel::Column, d.tp, d.sp, model.gdn.bias}, "proj", run);
  if (d.cp > 1) proj = all_to_all(b, "cp2hp", proj, "proj_hp", {d.rule_tokens, width / d.cp}, d.cp, gdn_attributes(model, run, d));
  return proj;
}

TensorId convolve(Builder& b, TensorId qkv, const GdnAttr& attr, const config::Run& run, const Dims& d) {
  ParamRef weight = b.param("gdn.conv1d", b.at(qkv).cols() * attr.kernel * d.cp, d.dtype); // sliced by heads at run time
  if (!run.deterministic) return conv_silu(b, "conv1d", qkv, std::move(weight), attr, "conv");
  TensorId transposed = copy(b, "conv1d.transpose", qkv, "conv_in");
  TensorId pre = conv(b, "conv1d.conv", transposed, std::move(weight), attr, "conv_pre");
  return silu(b, "conv1d", pre, "conv");
}

PreparedInputs prepare(Builder& b, TensorId conv, TensorId z, bool normalise, const GdnAttr& a) {
  const std::int64_t R = b.at(conv).rows();
  auto parts = split(b, "split_qkv", conv, {{"qk_view", {R, 2 * a.key_heads, a.key_dim}},
                                            {"v_view", {R, a.value_heads, a.value_dim}}});
  TensorId qk = parts[0];
  if (normalise) qk = l2_norm(b, "l2norm", qk, a, "qk_norm").y;
  auto heads = split(b, "split_qk", qk, {{"q_view", {R, a.key_heads, a.key_dim}}, {"k_view", {R, a.key_heads, a.key_dim}}});
  TensorId q = expand_heads(b, "expand_q", heads[0], a.value_heads, a.key_dim, "q");
  TensorId k = expand_heads(b, "expand_k", heads[1], a.value_heads, a.key_dim, "k");
  TensorId v = copy(b, "copy_v", parts[1], "v");
  return {q, k, v, copy(b, "copy_z", z, "z")};
}

TensorId project_out(Builder& b, TensorId o, TensorId z, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  GdnAttr attr = gdn_attributes(model, run, d);
  attr.eps = s.norm_eps;
  TensorId gated = gated_norm(b, "gated_norm", o, z, b.param("gdn.out_norm", s.value_head_dim, d.dtype), attr,
                              run.build == config::Build::Te, "gated");
  TensorId norm_out = copy(b, "hp2cp.transpose", gated, "norm_out_hp");
  if (d.cp > 1) norm_out = all_to_all(b, "hp2cp", norm_out, "norm_out", {d.tokens, s.value_heads / d.tp, s.value_head_dim}, d.cp);
  return adapted_linear(b, "out_proj", "out_proj", norm_out, b.param("gdn.out_proj", (s.v() / d.tp) * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp, s.bias}, "out", run);
}

} // namespace gdn::model::megatron
