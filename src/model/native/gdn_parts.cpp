#include "model/native/gdn_parts.h"

#include "model/kinds/gdn.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"

namespace gdn::model::native {

GdnAttr gdn_attributes(const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const std::int64_t shard = d.tp * d.cp;
  return {.key_heads = s.key_heads / shard, .value_heads = s.value_heads / shard, .key_dim = s.key_head_dim,
          .value_dim = s.value_head_dim, .kernel = s.conv_kernel, .conv_bias = s.conv_bias,
          .normalise = s.use_qk_l2norm && run.l2norm != config::L2Norm::Off, .grouped = true,
          .negative_eigenvalues = s.negative_eigenvalues, .eps = 1e-6, .chunks = d.chunks, .sequences = d.sequences};
}

TensorId project(Builder& b, TensorId x, std::int64_t width, const config::Model& model, const config::Run& run, const Dims& d) {
  TensorId xn = rms_norm(b, "input_norm", x, b.param("input_norm", d.hidden, d.dtype),
                         {model.norm_eps, model.zero_centred_norm}, "xn").y;               // [N_sp, h]
  TensorId proj = linear(b, "in_proj", xn, b.param("gdn.in_proj", width * d.hidden, d.dtype), width,
                         {TensorParallel::Column, d.tp, d.sp, model.gdn.bias}, "proj");  // [N, width]
  if (d.cp > 1) proj = all_to_all(b, "cp2hp", proj, "proj_hp", {d.rule_tokens, width / d.cp}, d.cp, gdn_attributes(model, run, d));
  return proj;
}

GdnPreParams front_end_params(const Builder& b, std::int64_t a_log, std::int64_t dt_bias, const GdnAttr& a, const Dims& d) {
  const std::int64_t channels = 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
  return {b.param("gdn.conv1d", channels * a.kernel * d.cp, d.dtype), b.param("gdn.A_log", a_log * d.cp, DType::FP32),
          b.param("gdn.dt_bias", dt_bias * d.cp, DType::FP32)};
}

TensorId project_out(Builder& b, TensorId o, TensorId z, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  GdnAttr a = gdn_attributes(model, run, d);
  a.eps = s.norm_eps;
  TensorId y = gated_norm(b, "gated_norm", o, z, b.param("gdn.out_norm", a.value_dim, d.dtype), a, false, "norm_out");
  if (d.cp > 1) y = all_to_all(b, "hp2cp", y, "norm_out_cp", {d.tokens, a.value_heads * d.cp, a.value_dim}, d.cp);
  return linear(b, "out_proj", y, b.param("gdn.out_proj", (s.v() / d.tp) * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp, s.bias}, "out");
}

} // namespace gdn::model::native
