#include "model/megatron/gdn.h"

#include "model/kinds/plumbing.h"
#include "model/megatron/gdn_parts.h"

namespace gdn::model::megatron {

// Row by row the table of megatron-core's gated_delta_net forward; what backward keeps follows from
// the steps of each kind. R = s*b rows after the exchange (N at cp = 1), heads are this rank's.
TensorId gdn_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  const GdnAttr a = gdn_attributes(model, run, d);
  const std::int64_t R = d.rule_tokens, hk = a.key_heads, hv = a.value_heads, dk = a.key_dim, dv = a.value_dim;
  const std::int64_t width = (2 * s.qk() + 2 * s.v() + 2 * s.value_heads) / d.tp; // D / tp
  const bool caller_norm = s.use_qk_l2norm && run.l2norm == config::L2Norm::Caller;

  TensorId proj = project(b, x, width, model, run, d);                                  // [R, D]
  auto parts = split(b, "split", proj, {{"qkv", {R, 2 * hk * dk + hv * dv}},
                                        {"z_view", {R, hv, dv}},
                                        {"beta_view", {R, hv}},
                                        {"alpha_view", {R, hv}}});
  TensorId conv = convolve(b, parts[0], a, run, d);                                     // [R, C]
  PreparedInputs in = prepare(b, conv, parts[1], caller_norm, a);                       // [R, Hv, d]
  TensorId beta_logits = parts[2], alpha = parts[3];
  if (gate_inputs_are_copies(run.revision)) { // the gates are a function of their own, given copies
    beta_logits = copy(b, "copy_beta", beta_logits, "beta_copy");
    alpha = copy(b, "copy_alpha", alpha, "alpha_copy");
  }
  GateOutputs gate = gates(b, "gates", beta_logits, alpha, b.param("gdn.A_log", hv * d.cp, d.dtype),
                           b.param("gdn.dt_bias", hv * d.cp, d.dtype), a);              // [R, Hv]
  const bool factored = run.revision.has("gdn_qkv") || run.revision.has("gdn_in_proj_conv");
  if (factored) b.hold_frame_until_here(conv); // the front end is a function of its own
  RuleOutputs rule = gated_delta_rule(b, "rule", in.q, in.k, in.v, gate.g, gate.beta, a); // [R, Hv, dv]
  TensorId out = project_out(b, rule.o, in.z, model, run, d);                           // [N_sp, h]
  if (!factored) b.hold_frame_until_here(conv); // a local of the module's own forward
  b.hold_frame_until_here(gate.g);
  return out;
}

bool gate_inputs_are_copies(const Revision& revision) {
  return revision.has("gdn_in_proj_conv") && !revision.has("gate_views");
}

} // namespace gdn::model::megatron
