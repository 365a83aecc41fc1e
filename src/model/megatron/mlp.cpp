#include "model/megatron/mlp.h"

#include "model/kinds/linear.h"
#include "model/kinds/mlp.h"
#include "model/kinds/moe.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/adapted_linear.h"

namespace gdn::model::megatron {

TensorId dense_mlp(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const std::int64_t ffn = model.ffn / d.tp;
  TensorId h = x;
  if (run.build == config::Build::Te)
    h = rms_norm(b, "mlp.layer_norm", x, b.param("mlp_norm", d.hidden, d.dtype), {model.norm_eps, model.zero_centred_norm},
                 "mlp_ln_out").y;
  TensorId fc1 = adapted_linear(b, "linear_fc1", "mlp_fc1", h, b.param("mlp.fc1", 2 * ffn * d.hidden, d.dtype), 2 * ffn,
                        {TensorParallel::Column, d.tp, d.sp}, "fc1", run);               // [N, gate | up]
  TensorId act = swiglu(b, "mlp_act", fc1, "act");                                       // [N, ffn]
  return adapted_linear(b, "linear_fc2", "mlp_fc2", act, b.param("mlp.fc2", ffn * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp}, "mlp_out", run);              // [N_sp, h]
}

namespace {

MoeAttr moe_attributes(const config::Model& model, const Dims& d) {
  const config::MoeShape& s = model.moe;
  return {.experts = s.experts, .local_experts = s.experts / d.ep, .top_k = s.top_k, .ffn = s.ffn / d.etp,
          .renormalise = s.renormalise, .sigmoid = s.score == "sigmoid",
          .aux_coeff = s.aux_loss_coeff, .z_coeff = s.z_loss_coeff};
}

// Shared expert with its sigmoid gate.
TensorId shared_expert(Builder& b, TensorId m_y, const config::MoeShape& s, const config::Run& run, const Dims& d) {
  const std::int64_t ffn = s.shared_ffn / d.tp;
  TensorId fc1 = adapted_linear(b, "linear_fc1", "shared_fc1", m_y, b.param("moe.shared.fc1", 2 * ffn * d.hidden, d.dtype), 2 * ffn,
                        {TensorParallel::Column, d.tp, d.sp}, "sh_fc1", run);            // [N, gate | up]
  TensorId act = swiglu(b, "shared_act", fc1, "sh_act");
  TensorId out = adapted_linear(b, "linear_fc2", "shared_fc2", act, b.param("moe.shared.fc2", ffn * d.hidden, d.dtype), d.hidden,
                        {TensorParallel::Row, d.tp, d.sp}, "sh_out", run);               // [T, h]
  if (!s.shared_gate) return out;
  return shared_gate(b, "shared_gate", m_y, out, b.param("moe.shared.gate", d.hidden, d.dtype), "sh_gated");
}

} // namespace

TensorId moe(Builder& b, TensorId m_y, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::MoeShape& s = model.moe;
  const MoeAttr a = moe_attributes(model, d);
  const std::int64_t T = d.tokens_sp;
  const std::int64_t sent = run.moe_capacity_factor ? d.routed_rows / d.etp : T * s.top_k;
  const Bytes element = size_of(d.dtype);
  const Exchange over = expert_exchange(d.ep, d.etp, sent, d.routed_rows, d.hidden * element + size_of(s.router_dtype));
  const Exchange home = expert_exchange(d.ep, d.etp, sent, d.routed_rows, d.hidden * element);

  TensorId shared = s.shared_ffn > 0 ? shared_expert(b, m_y, s, run, d) : -1;
  TensorId logits = linear(b, "router", m_y, b.param("moe.router", s.experts * d.hidden, d.dtype), s.experts, {}, "router_logits",
                           s.router_dtype);                                              // [T, E]
  b.list().ops.back().model_flops = 0; // Megatron's count leaves the router out
  RouteOutputs routing = route(b, "routing", logits, a, "kept by the routing functions and as dispatcher attributes");
  if (a.aux_coeff > 0) { // slots are counted over the ranks that hold other tokens of the same sequences
    if (d.sp) b.list().ops.back().collectives.push_back({CollectiveKind::AllReduce, Group::Tp, d.tp, s.experts * 8});
    if (d.cp > 1) b.list().ops.back().collectives.push_back({CollectiveKind::AllReduce, Group::Cp, d.cp, s.experts * 8});
  }
  b.hold(routing.probs, HoldKind::NextForward);
  b.hold(routing.map, HoldKind::NextForward);
  PermuteOutputs sorted = permute(b, "permute", m_y, routing, sent, run.moe_permute_fusion, a); // [T k, h]
  TensorId e_in = sorted.rows, e_prob = sorted.prob;
  if (over.any()) {
    RowsOutputs received = dispatch(b, "dispatch", e_in, e_prob, d.routed_rows, over.out, over.back, a);
    e_in = received.rows;
    e_prob = received.prob;
  }
  const std::int64_t weights = a.local_experts * a.ffn * d.hidden;
  TensorId fc1 = grouped_linear(b, "expert_fc1", e_in, b.param("moe.experts.fc1", 2 * weights, d.dtype), 2 * a.ffn, a, "e_fc1");
  TensorId act = swiglu_prob(b, "expert_act", fc1, e_prob, "e_act");                     // [T', f]
  TensorId rows = grouped_linear(b, "expert_fc2", act, b.param("moe.experts.fc2", weights, d.dtype), d.hidden, a, "e_out");
  if (over.any()) rows = combine(b, "combine", rows, sent, home.back, home.out, a, "combined");
  TensorId routed = unpermute(b, "unpermute", rows, sorted.row_map, T, a, "routed");    // [T, h]
  if (run.settings.moe_probs_at_unpermute)
    b.list().ops.back().pins = {{rows, "multiplied by its probability in unpermute"}, {sorted.prob, "its factor"}};
  return shared < 0 ? routed : residual_add(b, "moe_out", routed, shared, "moe_sum");
}

} // namespace gdn::model::megatron
