#include <algorithm>
#include <vector>

#include "reference/gates.h"
#include "reference/linear.h"
#include "reference/moe.h"
#include "reference/permute.h"
#include "trainer/comm/ranks.h"
#include "trainer/cpu/collectives.h"
#include "trainer/cpu/routing.h"

// Native's compact routing: k slots a token.
namespace gdn::trainer::cpu {

using model::MoeAttr;
using reference::ConstValues;
using reference::Values;

void add_routing_totals(const OpCall& c, ConstValues logits, std::span<const std::int64_t> counts, bool summed) {
  if (c.pass() != program::Pass::Forward || c.context().totals == nullptr) return;
  const auto& a = c.attr<MoeAttr>();
  StepTotals& totals = *c.context().totals;
  totals.expert_load.resize(std::max(totals.expert_load.size(), counts.size()));
  if (!summed || is_first_token_shard(c))
    for (size_t e = 0; e < counts.size(); ++e) totals.expert_load[e] += counts[e];
  const std::int64_t shards = token_shards(c);
  if (a.aux_coeff > 0)
    totals.aux_loss += c.context().aux_scale *
                       reference::balance_loss(router_of(a), {a.aux_coeff, static_cast<double>(a.top_k), logits.rows * shards}, logits, counts);
  if (a.z_coeff > 0) totals.aux_loss += c.context().aux_scale * reference::z_loss(a.z_coeff, logits) / static_cast<double>(shards);
}

std::int64_t token_shards(const OpCall& c) { return c.context().ranks ? c.context().ranks->token_shards() : 1; }

bool is_first_token_shard(const OpCall& c) {
  const Ranks* ranks = c.context().ranks;
  return !ranks || (ranks->place().cp == 0 && (!ranks->sequence_parallel() || ranks->place().tp == 0));
}

void route_tokens(const OpCall& c, View logits, View index, View weight, View scores) {
  reference::Router router = router_of(c.attr<MoeAttr>());
  if (!router.balanced || token_shards(c) == 1)
    return reference::route_forward(router, values(logits), values(index), values(weight), values(scores));
  const Place& place = c.context().ranks->place();
  const std::int64_t first = c.context().ranks->sequence_parallel() ? place.tp * logits.rows : 0;
  auto row = [](View v, std::int64_t i) { return v ? View{v.data + i * v.stride * size_of(v.dtype), v.dtype, 1, v.cols, v.stride} : v; };
  for (std::int64_t i = 0; i < logits.rows; ++i) {
    const std::int64_t local = first + i;
    const auto* shards = c.batch().shards;
    router.first_slot = router.top_k * (shards ? shards->tokens[static_cast<size_t>(place.cp)][static_cast<size_t>(local)] : local);
    reference::route_forward(router, values(row(logits, i)), values(row(index, i)), values(row(weight, i)), values(row(scores, i)));
  }
}

namespace {

// inputs logits [T, E]; outputs weights, experts [T, k].
void top_k_forward(const OpCall& c) {
  route_tokens(c, c.in(0), c.out(1), c.out(0), {});
}
void top_k_backward(const OpCall& c) {
  const auto& a = c.attr<MoeAttr>();
  const ConstValues experts = values(c.out(1)), dw = values(c.d_out(0));
  const reference::ValuesGrad dlogits = values_grad(c.d_in(0));
  if (!a.renormalise) return reference::route_backward(router_of(a), values(c.in(0)), experts, dw, dlogits);
  // A softmax over the chosen logits: dl_j = w_j (dw_j - sum w_i dw_i), 0 for the others.
  const ConstValues w = values(c.out(0));
  std::vector<double> row(static_cast<size_t>(a.experts));
  for (std::int64_t t = 0; t < w.rows; ++t) {
    std::fill(row.begin(), row.end(), 0.0);
    double dot = 0;
    for (std::int64_t j = 0; j < a.top_k; ++j) dot += w.get(t, j) * dw.get(t, j);
    for (std::int64_t j = 0; j < a.top_k; ++j) row[static_cast<size_t>(experts.get(t, j))] = w.get(t, j) * (dw.get(t, j) - dot);
    for (std::int64_t e = 0; e < a.experts; ++e) dlogits.put(t, e, row[static_cast<size_t>(e)]);
  }
}

// inputs logits, counts [E]; no outputs.
std::vector<std::int64_t> counts_of(ConstValues kept) {
  std::vector<std::int64_t> counts;
  for (std::int64_t e = 0; e < kept.rows; ++e) counts.push_back(static_cast<std::int64_t>(kept.get(e, 0)));
  return counts;
}
void loss_forward(const OpCall& c) { add_routing_totals(c, values(c.in(0)), counts_of(values(c.in(1))), true); }
void loss_backward(const OpCall& c) {
  const auto& a = c.attr<MoeAttr>();
  const ConstValues logits = values(c.in(0));
  const auto counts = counts_of(values(c.in(1)));
  reference::ValuesGrad dlogits = values_grad(c.d_in(0));
  if (a.aux_coeff > 0) {
    reference::balance_loss_backward(router_of(a), {a.aux_coeff, static_cast<double>(a.top_k), logits.rows * token_shards(c)}, logits, counts,
                                     c.context().aux_scale, dlogits);
    dlogits.write = Write::Accumulate;
  }
  if (a.z_coeff > 0) reference::z_loss_backward(a.z_coeff, logits, c.context().aux_scale / static_cast<double>(token_shards(c)), dlogits);
}

// inputs weights, experts; outputs row map [T, k], offsets [E + 1], weight of each row, counts [E].
void sort_forward(const OpCall& c) {
  const auto& a = c.attr<MoeAttr>();
  reference::Permutation p = reference::sort_slots(a.experts, values(c.in(1)), a.capacity);
  const Values offsets = values(c.out(1)), row_prob = values(c.out(2));
  p.slot_of_row.resize(static_cast<size_t>(row_prob.rows), -1);
  reference::store_row_map(p, values(c.out(0)));
  for (std::int64_t e = 0; e < offsets.rows; ++e) offsets.set(e, 0, static_cast<double>(p.groups[static_cast<size_t>(e)]));
  reference::permute_weights(p, values(c.in(0)), row_prob);
  const auto slots = reference::expert_counts(a.experts, values(c.in(1)));
  const Values counts = values(c.out(3));
  for (std::int64_t e = 0; e < counts.rows; ++e) counts.set(e, 0, static_cast<double>(slots[static_cast<size_t>(e)]));
}
void sort_backward(const OpCall& c) {
  const ConstValues d = values(c.d_out(2));
  reference::unpermute_weights(reference::load_row_map(values(c.out(0)), d.rows), d, values_grad(c.d_in(0)));
}

// inputs x [T, h], row map; output rows [R, h].
void gather_forward(const OpCall& c) {
  const View rows = c.out(0);
  const auto p = reference::load_row_map(values(c.in(1)), rows.rows);
  with_type(rows.dtype, [&]<class T>() { reference::permute_forward<T>(p, top_k_of(c), mat<T>(c.in(0)), mat<T>(rows)); });
}
void gather_backward(const OpCall& c) {
  const View drows = c.d_out(0);
  const auto p = reference::load_row_map(values(c.in(1)), drows.rows);
  with_type(drows.dtype, [&]<class T>() { reference::permute_backward<T>(p, top_k_of(c), mat<T>(drows), grad<T>(c.d_in(0))); });
}

// input x [N, h]; output score [N] = sigmoid(x . w); parameter w [1, h]. Over TP ranks the scores of all rows
// are gathered, and each rank's part of their gradient is summed.
Bytes score_scratch(const model::OpList& list, const model::Op& op, int step) { // gradients of the score and before the sigmoid
  const DType dtype = accumulator(list.tensor(op.inputs[0]).dtype);
  if (step < 0) return 0;
  const bool summed = !op.steps[static_cast<size_t>(step)].collectives.empty();
  return round_up(list.tensor(op.inputs[0]).rows() * size_of(dtype), 8) + (summed ? round_up(list.tensor(op.outputs[0]).bytes(), 8) : 0);
}
// This rank's rows of the scores of all.
View own_rows(const OpCall& c, View score, std::int64_t rows) {
  if (score.rows == rows) return score;
  score.data += c.group(Group::Tp).rank() * rows * size_of(score.dtype);
  score.rows = rows;
  return score;
}
void score_forward(const OpCall& c) {
  const View x = c.in(0), all = c.out(0), score = own_rows(c, all, x.rows);
  with_type(x.dtype, [&]<class T>() {
    reference::linear_forward<T, Acc<T>>(mat<T>(x), mat<T>(c.param(0, 1, x.cols)), {}, mat<Acc<T>>(score));
  });
  for (std::int64_t i = 0; i < score.rows; ++i) values(score).set(i, 0, reference::sigmoid(values(score).get(i, 0)));
  if (!c.op().collectives.empty()) gather_rows(c.group(Group::Tp), score, all);
}
void score_backward(const OpCall& c) {
  const View x = c.in(0), score = own_rows(c, c.out(0), x.rows);
  std::span<std::byte> scratch = c.scratch(score_scratch(c.list(), c.op(), c.step()));
  const View d = take(scratch, accumulator(x.dtype), x.rows, 1);
  View dscore = c.d_out(0);
  if (!c.backward_step().collectives.empty()) {
    const View all = take(scratch, dscore.dtype, dscore.rows, 1);
    copy_view(dscore, all);
    dscore = own_rows(c, all, x.rows);
    if (x.rows < all.rows) scatter_sum(c.group(Group::Tp), all, {dscore, false});
    else reduce(c.group(Group::Tp), all);
  }
  for (std::int64_t i = 0; i < x.rows; ++i) {
    const double s = values(score).get(i, 0);
    values(d).set(i, 0, values(dscore).get(i, 0) * s * (1 - s));
  }
  with_type(x.dtype, [&]<class T>() {
    if (GradView dx = c.d_in(0)) reference::linear_dgrad<T, Acc<T>>(mat<Acc<T>>(d), mat<T>(c.param(0, 1, x.cols)), grad<T>(dx));
    if (View dw = c.param_grad(0, 1, x.cols)) reference::linear_wgrad<T, Acc<T>>(mat<Acc<T>>(d), mat<T>(x), mat<Acc<T>>(dw));
  });
}

} // namespace

std::span<const Entry> routing_ops() {
  static const Entry ops[] = {
      {model::OpKind::TopK, {top_k_forward, top_k_backward}},
      {model::OpKind::RouterLoss, {loss_forward, loss_backward}},
      {model::OpKind::Sort, {sort_forward, sort_backward}},
      {model::OpKind::Gather, {gather_forward, gather_backward}},
      {model::OpKind::SharedScore, {score_forward, score_backward, score_scratch}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
