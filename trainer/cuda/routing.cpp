#include "trainer/cuda/routing.h"

#include <algorithm>

#include "kernels/common/elementwise.h"
#include "kernels/common/reduce.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/shared_gate.h"
#include "kernels/moe/sort.h"
#include "trainer/cuda/collectives.h"

// Native's compact routing: k slots a token.
namespace gdn::trainer::cuda {

using model::MoeAttr;

double balance_factor(const MoeAttr& a, std::int64_t tokens) {
  const double n = static_cast<double>(tokens);
  return a.aux_coeff * static_cast<double>(a.experts) / (static_cast<double>(a.top_k) * n * n);
}

void add_routing_totals(const OpCall& c, Engine& e, const Matrix& logits, const std::int32_t* counts, bool summed, void* losses) {
  if (c.pass() != program::Pass::Forward || c.context().totals == nullptr) return;
  const auto& a = c.attr<MoeAttr>();
  e.experts_seen = std::max(e.experts_seen, static_cast<int>(a.experts));
  if (!summed || is_first_token_shard(c)) kernels::add_counts(counts, static_cast<int>(a.experts), e.totals.load, e.launch());
  if (a.aux_coeff == 0 && a.z_coeff == 0) return;
  const Matrix by_token{losses, DType::FP32, logits.rows, 1, 1};
  const std::int64_t tokens = logits.rows * token_shards(c); // of all ranks that share them: this one adds its part
  kernels::route_losses(logits, counts, static_cast<float>(balance_factor(a, tokens)), static_cast<float>(a.z_coeff / static_cast<double>(tokens)),
                        by_token, e.launch());
  kernels::add_sum(by_token, c.context().aux_scale, e.totals.sums + DeviceTotals::kAux, e.launch());
}

namespace {

// inputs logits [T, E]; outputs weights, experts [T, k].
void top_k_forward(const OpCall& c, Engine& e) {
  if (c.attr<MoeAttr>().forced_balance && token_shards(c) > 1)
    throw Error(ErrorCode::Config, "forced balance deals out the slots of whole sequences: on cuda not where ranks share a sequence's tokens",
                "moe_router_force_load_balancing: false; or no context and sequence parallelism");
  kernels::RouteForwardParams p;
  p.route = route_of(c.attr<MoeAttr>());
  p.logits = matrix(c.in(0));
  p.weights = matrix(c.out(0));
  p.experts[0] = matrix(c.out(1));
  kernels::route_forward(p, e.launch());
}
void top_k_backward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  kernels::RouteBackwardParams p;
  p.route = route_of(a);
  if (a.renormalise) p.weights = matrix(c.out(0));
  else p.logits = matrix(c.in(0));
  p.experts = matrix(c.out(1));
  p.d_weights = matrix(c.d_out(0));
  p.d_logits = gradient(c.d_in(0));
  kernels::route_backward(p, e.launch());
}

// inputs logits, counts [E]; no outputs.
void loss_forward(const OpCall& c, Engine& e) {
  const LaunchContext context = e.launch(c);
  const View logits = c.in(0), counts = c.in(1);
  add_routing_totals(c, e, matrix(logits), data<std::int32_t>(counts), true, context.scratch);
}
void loss_backward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  const View logits = c.in(0);
  kernels::RouteBackwardParams p;
  p.route = route_of(a);
  p.logits = matrix(logits);
  p.counts = data<std::int32_t>(c.in(1));
  const std::int64_t tokens = logits.rows * token_shards(c);
  p.balance = static_cast<float>(balance_factor(a, tokens) * c.context().aux_scale);
  p.z = static_cast<float>(2 * a.z_coeff / static_cast<double>(tokens) * c.context().aux_scale);
  p.d_logits = gradient(c.d_in(0));
  kernels::route_backward(p, e.launch());
}

// inputs weights, experts; outputs row map [T, k], offsets [E + 1], weight of each row, counts [E].
void sort_forward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  const View experts = c.in(1), row_map = c.out(0), row_prob = c.out(2);
  kernels::sort_slots({matrix(experts), static_cast<int>(a.experts), a.capacity, matrix(row_map), data<std::int32_t>(c.out(3)),
                       data<std::int32_t>(c.out(1))}, e.launch());
  if (a.capacity > 0 || row_prob.rows != experts.rows * experts.cols) kernels::fill({matrix(row_prob), false}, 0, e.launch());
  kernels::weights_to_rows(matrix(row_map), matrix(c.in(0)), {}, {}, matrix(row_prob), e.launch());
}
void sort_backward(const OpCall& c, Engine& e) {
  kernels::weights_from_rows(matrix(c.out(0)), matrix(c.d_out(2)), gradient(c.d_in(0)), e.launch());
}

// inputs x [T, h], row map; output rows [R, h].
void gather_forward(const OpCall& c, Engine& e) {
  const View row_map = c.in(1), rows = c.out(0);
  if (c.attr<MoeAttr>().capacity > 0 || rows.rows != row_map.rows * row_map.cols) kernels::fill({matrix(rows), false}, 0, e.launch());
  kernels::spread_rows(matrix(c.in(0)), matrix(row_map), {matrix(rows), false}, e.launch());
}
void gather_backward(const OpCall& c, Engine& e) {
  kernels::collect_rows(matrix(c.d_out(0)), matrix(c.in(1)), gradient(c.d_in(0)), e.launch());
}

// input x [N, h]; output score [N] = sigmoid(x . w); parameter w [1, h]. Over TP ranks the scores of all rows are gathered,
// and each rank's part of their gradient is summed.
View own_rows(const OpCall& c, const View& score, std::int64_t rows) {
  return score.rows == rows ? score : rows_of(score, c.group(Group::Tp).rank() * rows, rows);
}
void score_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), all = c.out(0), score = own_rows(c, all, x.rows);
  kernels::row_score(matrix(x), matrix(c.param(0, 1, x.cols)), true, matrix(score), e.launch());
  if (!c.op().collectives.empty()) gather_rows(c.group(Group::Tp), score, all, e);
}
void score_backward(const OpCall& c, Engine& e) {
  const View x = c.in(0), score = own_rows(c, c.out(0), x.rows);
  View d_score = c.d_out(0);
  if (!c.backward_step().collectives.empty()) {
    LaunchContext memory = ranks_memory(c, e);
    const View all = take(memory, d_score.dtype, d_score.rows, 1);
    copy(d_score, all, e);
    d_score = own_rows(c, all, x.rows);
    if (x.rows < all.rows) scatter_sum(c.group(Group::Tp), all, {d_score, false}, e);
    else reduce(c.group(Group::Tp), all);
  }
  LaunchContext context = e.launch(c);
  const Matrix d{take(context, x.rows * 4), DType::FP32, x.rows, 1, 1};
  kernels::row_score_backward(matrix(score), matrix(d_score), d, context);
  if (const GradView dx = c.d_in(0)) kernels::outer(d, matrix(c.param(0, 1, x.cols)), gradient(dx), context);
  if (const View dw = c.param_grad(0, 1, x.cols)) kernels::column_sums(matrix(x), d, data<float>(dw), context);
}

} // namespace

std::span<const Entry> routing_ops() {
  static const Entry ops[] = {
      {model::OpKind::TopK, {top_k_forward, top_k_backward}},
      {model::OpKind::RouterLoss, {loss_forward, loss_backward}},
      {model::OpKind::Sort, {sort_forward, sort_backward}},
      {model::OpKind::Gather, {gather_forward, gather_backward}},
      {model::OpKind::SharedScore, {score_forward, score_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
