#include "model/kinds/gdn2.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/gdn_parts.h"

namespace gdn::model::megatron {

// Sections q, k, v, z, f (decay), b (erase), w (write). The norm of q and k stays the caller's.
TensorId gdn2_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::GdnShape& s = model.gdn;
  GdnAttr a = gdn_attributes(model, run, d);
  a.normalise = false;
  const std::int64_t R = d.rule_tokens, hk = a.key_heads, hv = a.value_heads, dk = a.key_dim, dv = a.value_dim;
  const std::int64_t width = (4 * s.qk() + 3 * s.v()) / d.tp; // D / tp

  TensorId proj = project(b, x, width, model, run, d);                                  // [R, D]
  auto parts = split(b, "split", proj, {{"qkv", {R, 2 * hk * dk + hv * dv}},
                                        {"z_view", {R, hv, dv}},
                                        {"f_view", {R, hk, dk}},
                                        {"b_view", {R, hk, dk}},
                                        {"w_view", {R, hv, dv}}});
  TensorId conv = convolve(b, parts[0], a, run, d);                                     // [R, C]
  PreparedInputs in = prepare(b, conv, parts[1], s.use_qk_l2norm && run.l2norm != config::L2Norm::Off, a);
  Gdn2GateOutputs gate = gdn2_gates(b, "gdn2_gates", parts[2], parts[3], parts[4], b.param("gdn.A_log", hk * d.cp, d.dtype),
                                    b.param("gdn.dt_bias", hk * dk * d.cp, d.dtype), a); // [R, Hv, d]
  TensorId o = gdn2_rule(b, "rule", in.q, in.k, in.v, gate, a);                         // [R, Hv, dv]
  TensorId out = project_out(b, o, in.z, model, run, d);                                // [N_sp, h]
  b.hold_frame_until_here(conv); // locals of the module's forward
  b.hold_frame_until_here(gate.g);
  return out;
}

} // namespace gdn::model::megatron
