#include "model/native/moe.h"

#include "model/kinds/linear.h"
#include "model/kinds/mlp.h"
#include "model/kinds/moe.h"
#include "model/kinds/plumbing.h"
#include "model/kinds/routing.h"

namespace gdn::model::native {

namespace {

MoeAttr attributes(const config::Model& model, const config::Run& run, std::int64_t sent, const Dims& d) {
  const config::MoeShape& s = model.moe;
  return {.experts = s.experts, .local_experts = s.experts / d.ep, .top_k = s.top_k, .ffn = s.ffn / d.etp,
          .renormalise = s.renormalise, .sigmoid = s.score == "sigmoid", .forced_balance = run.moe_router_force_load_balancing,
          .aux_coeff = s.aux_loss_coeff, .z_coeff = s.z_loss_coeff,
          .capacity = run.moe_capacity_factor ? sent / s.experts : 0};
}

// The shared expert; its gate's score enters the activation as a routed row's probability does.
TensorId shared_expert(Builder& b, TensorId mn, const config::MoeShape& s, const Dims& d) {
  const std::int64_t ffn = s.shared_ffn / d.tp;
  TensorId score = s.shared_gate ? shared_score(b, "shared_score", mn, b.param("moe.shared.gate", d.hidden, d.dtype), d.tp, d.sp,
                                                "sh_score")                              // [N]
                                 : -1;
  TensorId fc1 = linear(b, "shared_fc1", mn, b.param("moe.shared.fc1", 2 * ffn * d.hidden, d.dtype), 2 * ffn,
                        {TensorParallel::Column, d.tp, d.sp}, "sh_fc1");                 // [N, gate | up]
  TensorId act = s.shared_gate ? swiglu_prob(b, "shared_act", fc1, score, "sh_act") : swiglu(b, "shared_act", fc1, "sh_act");
  return linear(b, "shared_fc2", act, b.param("moe.shared.fc2", ffn * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp}, "sh_out");                            // [T, h]
}

// The ranks that hold other tokens of this rank's sequences: their slots are counted together.
std::vector<Collective> over_the_sequence(const Dims& d, std::int64_t experts) {
  std::vector<Collective> sums;
  if (d.sp) sums.push_back({CollectiveKind::AllReduce, Group::Tp, d.tp, experts * 4});
  if (d.cp > 1) sums.push_back({CollectiveKind::AllReduce, Group::Cp, d.cp, experts * 4});
  return sums;
}

} // namespace

TensorId moe(Builder& b, TensorId m, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::MoeShape& s = model.moe;
  const std::int64_t T = d.tokens_sp;
  const std::int64_t sent = run.moe_capacity_factor ? d.routed_rows / d.etp : T * s.top_k;
  const MoeAttr a = attributes(model, run, sent, d);
  const Bytes row = d.hidden * size_of(d.dtype);
  const Exchange over = expert_exchange(d.ep, d.etp, sent, d.routed_rows, row + 4), // with its fp32 probability
                 home = expert_exchange(d.ep, d.etp, sent, d.routed_rows, row);

  TensorId mn = rms_norm(b, "mlp_norm", m, b.param("mlp_norm", d.hidden, d.dtype), {model.norm_eps, model.zero_centred_norm}, "mn").y;
  TensorId shared = s.shared_ffn > 0 ? shared_expert(b, mn, s, d) : -1;
  TensorId logits = linear(b, "router", mn, b.param("moe.router", s.experts * d.hidden, d.dtype), s.experts, {}, "router_logits",
                           DType::FP32);                                                 // [T, E]
  b.list().ops.back().model_flops = 0; // as Megatron counts: no router
  const ParamRef bias = b.param("moe.expert_bias", s.experts, DType::FP32);
  TopKOutputs routing = top_k(b, "top_k", logits, a, a.sigmoid ? &bias : nullptr);       // [T, k]
  SortOutputs sorted = sort_slots(b, "sort", routing, sent, a);
  TensorId load = sorted.counts;                                                         // [E]
  if (const auto sums = over_the_sequence(d, s.experts); !sums.empty()) load = all_reduce(b, "load", load, sums, "load");
  router_loss(b, "router_loss", logits, load, a);
  TensorId rows = gather_rows(b, "gather", mn, sorted.row_map, sent, a, "rows");         // [T k, h]
  TensorId prob = sorted.row_prob, offsets = sorted.offsets, counts = -1;
  if (over.any()) {
    RowsOutputs received = dispatch(b, "dispatch", rows, prob, d.routed_rows, over.out, over.back, a, offsets);
    rows = received.rows;                                                                // [T', h]
    prob = received.prob;
    offsets = received.offsets;
    counts = received.counts;
  }
  const std::int64_t weights = a.local_experts * a.ffn * d.hidden;
  TensorId fc1 = grouped_linear(b, "expert_fc1", rows, b.param("moe.experts.fc1", 2 * weights, d.dtype), 2 * a.ffn, a, "e_fc1", offsets);
  TensorId act = swiglu_prob(b, "expert_act", fc1, prob, "e_act");                       // [T', f]
  TensorId out = grouped_linear(b, "expert_fc2", act, b.param("moe.experts.fc2", weights, d.dtype), d.hidden, a, "e_out", offsets);
  if (over.any()) out = combine(b, "combine", out, sent, home.back, home.out, a, "combined", {sorted.offsets, counts});
  TensorId routed = unpermute(b, "unpermute", out, sorted.row_map, T, a, "routed");      // [T, h]
  return shared < 0 ? routed : residual_add(b, "moe_out", routed, shared, "moe_sum");
}

} // namespace gdn::model::native
