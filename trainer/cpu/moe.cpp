#include <algorithm>
#include <vector>

#include <fmt/core.h>

#include "reference/heads.h"
#include "reference/linear.h"
#include "reference/mlp.h"
#include "reference/moe.h"
#include "reference/permute.h"
#include "trainer/comm/ranks.h"
#include "trainer/cpu/experts.h"
#include "trainer/cpu/routing.h"

namespace gdn::trainer::cpu {

using model::MoeAttr;
using reference::ConstValues;
using reference::Values;

namespace {

// --------------------------------------------------------------------------------- router ----

// Scores are kept for the chosen k where the weights are a softmax over them, else for all experts.
bool keeps_chosen(const MoeAttr& a) { return !a.sigmoid && a.renormalise; }

Bytes router_scratch(const model::OpList& list, const model::Op& op, int step) {
  const auto& a = std::get<MoeAttr>(op.attr);
  if (step >= 0 || keeps_chosen(a)) return 0;
  return list.tensor(op.inputs[0]).rows() * a.top_k * size_of(list.tensor(op.outputs[2]).dtype); // weights of the chosen
}

std::vector<std::int64_t> counts_of(const MoeAttr& a, ConstValues index) { return reference::expert_counts(a.experts, index); }

// inputs logits [T, E]; outputs probs, map [T, E], scores, top indices twice, scores of the auxiliary loss.
void router_forward(const OpCall& c) {
  const auto& a = c.attr<MoeAttr>();
  const View logits = c.in(0), scores = c.out(2), index = c.out(3);
  View weight = scores;
  if (!keeps_chosen(a)) {
    std::span<std::byte> scratch = c.scratch(router_scratch(c.list(), c.op(), -1));
    weight = {scratch.data(), scores.dtype, logits.rows, a.top_k, a.top_k};
  }
  const View all = !keeps_chosen(a) ? scores : a.aux_coeff > 0 ? c.out(5) : View{};
  route_tokens(c, logits, index, weight, all);
  reference::dense_from_slots(values(index), values(weight), values(c.out(0)), values(c.out(1)));
  reference::convert(values(index), values(c.out(4)));
  if (a.aux_coeff > 0 && !keeps_chosen(a)) reference::convert(values(scores), values(c.out(5)));
  // Slots of all ranks that share the tokens are host data of the stack itself, as its rows per expert are.
  std::vector<std::int64_t>& counts = c.host_table(c.op_index());
  counts = counts_of(a, values(index));
  for (const model::Collective& sum : c.op().collectives)
    c.group(sum.group).all_reduce(reinterpret_cast<std::byte*>(counts.data()), static_cast<std::int64_t>(counts.size()), DType::Int64);
  add_routing_totals(c, values(logits), counts, !c.op().collectives.empty());
}

// From the kept scores, not the logits. For one token, w the weights, s the scores, chosen j:
//   softmax over the chosen   dl_j = w_j (dw_j - sum w_i dw_i)
//   softmax over all          dl_e = s_e ([e chosen] dw_e - sum s_i dw_i)
//   sigmoid                   dl_j = ds_j s_j (1 - s_j), ds = dw, or (dw_j - sum w_i dw_i) / sum s_i where
//                             the weights are renormalised
void weights_backward(const MoeAttr& a, ConstValues scores, ConstValues index, ConstValues dprobs, std::int64_t t,
                      std::vector<double>& dlogits) {
  const std::int64_t k = a.top_k;
  auto expert = [&](std::int64_t j) { return static_cast<std::int64_t>(index.get(t, j)); };
  auto score = [&](std::int64_t j) { return scores.get(t, keeps_chosen(a) ? j : expert(j)); };
  double dot = 0, sum = 0;
  for (std::int64_t j = 0; j < k; ++j) {
    dot += score(j) * dprobs.get(t, expert(j));
    sum += score(j);
  }
  if (!a.sigmoid && !a.renormalise)
    for (std::int64_t e = 0; e < a.experts; ++e) dlogits[static_cast<size_t>(e)] -= scores.get(t, e) * dot;
  for (std::int64_t j = 0; j < k; ++j) {
    const double s = score(j), dw = dprobs.get(t, expert(j));
    double& d = dlogits[static_cast<size_t>(expert(j))];
    if (!a.sigmoid) d += a.renormalise ? s * (dw - dot) : s * dw;
    else d += (a.renormalise ? (dw - dot / sum) / sum : dw) * s * (1 - s);
  }
}

void router_backward(const OpCall& c) {
  const auto& a = c.attr<MoeAttr>();
  const ConstValues scores = values(c.out(2)), index = values(c.out(3)), dprobs = values(c.d_out_if_any(0));
  const ConstValues aux = a.aux_coeff > 0 ? ConstValues(values(c.out(5))) : ConstValues();
  c.out(4); // the indices of the scatter, equal to those of the choice
  const reference::ValuesGrad dlogits = values_grad(c.d_in(0));
  const std::int64_t n = index.rows, all = n * token_shards(c);
  std::vector<std::int64_t>& counts = c.host_table(c.op_index());
  if (counts.empty()) counts = counts_of(a, index); // a step run without its forward
  const double balance = a.aux_coeff * static_cast<double>(a.experts) /
                         (static_cast<double>(a.top_k) * static_cast<double>(all) * static_cast<double>(all)) * c.context().aux_scale;
  std::vector<double> row(static_cast<size_t>(a.experts));
  for (std::int64_t t = 0; t < n; ++t) {
    std::fill(row.begin(), row.end(), 0.0);
    if (dprobs) weights_backward(a, scores, index, dprobs, t, row);
    if (aux) { // gdn balance loss: p_te (cnt_e - sum_i p_ti cnt_i)
      double mean = 0;
      for (std::int64_t e = 0; e < a.experts; ++e) mean += aux.get(t, e) * static_cast<double>(counts[static_cast<size_t>(e)]);
      for (std::int64_t e = 0; e < a.experts; ++e)
        row[static_cast<size_t>(e)] += balance * aux.get(t, e) * (static_cast<double>(counts[static_cast<size_t>(e)]) - mean);
    }
    for (std::int64_t e = 0; e < a.experts; ++e) dlogits.put(t, e, row[static_cast<size_t>(e)]);
  }
  if (a.z_coeff > 0) {
    reference::ValuesGrad more = dlogits;
    more.write = Write::Accumulate;
    reference::z_loss_backward(a.z_coeff, values(c.in(0)), c.context().aux_scale / static_cast<double>(token_shards(c)), more);
  }
}

// ---------------------------------------------------------------------------- permutation ----

// Row of every slot and the slot's expert; slots of a token in ascending order of expert.
struct Slots {
  reference::Permutation permutation;
  std::vector<std::int64_t> expert;
};

Slots slots_of_map(const OpCall& c, ConstValues map, std::int64_t rows) {
  const auto& a = c.attr<MoeAttr>();
  Slots s;
  for (std::int64_t t = 0; t < map.rows; ++t)
    for (std::int64_t e = 0; e < a.experts; ++e)
      if (map.get(t, e) != 0) s.expert.push_back(e);
  const Mat<std::int64_t> index(s.expert.data(), map.rows, a.top_k);
  s.permutation = reference::sort_slots(a.experts, index);
  if (static_cast<std::int64_t>(s.permutation.slot_of_row.size()) > rows)
    throw Error(ErrorCode::DoesNotFit, fmt::format("{}: {} routed rows exceed the planned bound of {}", c.name(),
                                                   s.permutation.slot_of_row.size(), rows));
  s.permutation.slot_of_row.resize(static_cast<size_t>(rows), -1); // planned rows that nobody needs
  return s;
}

// The row map: per token the rows of its slots, then (fused form, 2 E + 1 wide) their experts.
void store_map(const Slots& s, std::int64_t k, Values map) {
  for (std::int64_t t = 0; t < map.rows; ++t)
    for (std::int64_t j = 0; j < map.cols; ++j) {
      const auto slot = static_cast<size_t>(t * k + j % k);
      map.set(t, j, static_cast<double>(j < k ? s.permutation.row_of_slot[slot] : j < 2 * k ? s.expert[slot] : 0));
    }
}
Slots load_map(const OpCall& c, ConstValues map, std::int64_t rows, const std::vector<std::int64_t>& groups) {
  const std::int64_t k = top_k_of(c);
  Slots s;
  ConstValues of_rows = map;
  of_rows.cols = k;
  s.permutation = reference::load_row_map(of_rows, rows);
  s.permutation.groups = groups;
  for (std::int64_t t = 0; t < map.rows; ++t)
    for (std::int64_t j = 0; j < k; ++j)
      s.expert.push_back(map.cols > k ? static_cast<std::int64_t>(map.get(t, k + j))
                                      : std::upper_bound(groups.begin(), groups.end(), static_cast<std::int64_t>(map.get(t, j))) -
                                            groups.begin() - 1);
  return s;
}

// Rows per expert are host data of the stack itself (its grouped GEMM takes host sizes): the op that
// permutes or dispatches them leaves them, the ops on its rows find them.
int maker_of_rows(const OpCall& c, std::initializer_list<model::OpKind> kinds, int from) {
  int at = from;
  while (at >= 0 && std::find(kinds.begin(), kinds.end(), c.list().ops[static_cast<size_t>(at)].kind) == kinds.end())
    at = c.list().producer(c.list().ops[static_cast<size_t>(at)].inputs.at(0));
  if (at < 0) throw Error(ErrorCode::Internal, fmt::format("{}: its rows come from no permutation", c.name()));
  return at;
}

// inputs x [T, h], probs, map [T, E]; outputs rows, prob of each row, row map.
void permute_forward(const OpCall& c) {
  const View rows = c.out(0);
  const Slots s = slots_of_map(c, values(c.in(2)), rows.rows);
  c.host_table(c.op_index()) = s.permutation.groups;
  store_map(s, top_k_of(c), values(c.out(2)));
  with_type(rows.dtype, [&]<class T>() { reference::permute_forward<T>(s.permutation, top_k_of(c), mat<T>(c.in(0)), mat<T>(rows)); });
  const ConstValues probs = values(c.in(1));
  const Values of_row = values(c.out(1));
  for (std::int64_t i = 0; i < of_row.rows; ++i) {
    const std::int64_t slot = s.permutation.slot_of_row[static_cast<size_t>(i)];
    of_row.set(i, 0, slot < 0 ? 0 : probs.get(slot / top_k_of(c), s.expert[static_cast<size_t>(slot)]));
  }
}
void permute_backward(const OpCall& c) {
  const View drows = c.d_out(0);
  const Slots s = load_map(c, values(c.out(2)), c.list().tensor(c.op().outputs[0]).rows(), c.host_table(c.op_index()));
  if (GradView dx = c.d_in(0))
    with_type(dx.to.dtype, [&]<class T>() { reference::permute_backward<T>(s.permutation, top_k_of(c), mat<T>(drows), grad<T>(dx)); });
  const ConstValues dprob = values(c.d_out(1));
  const reference::ValuesGrad dprobs = values_grad(c.d_in(1));
  const std::int64_t k = top_k_of(c);
  std::vector<double> row(static_cast<size_t>(dprobs.to.cols));
  for (std::int64_t t = 0; t < dprobs.to.rows; ++t) {
    std::fill(row.begin(), row.end(), 0.0);
    for (std::int64_t j = 0; j < k; ++j) {
      const auto slot = static_cast<size_t>(t * k + j);
      row[static_cast<size_t>(s.expert[slot])] = dprob.get(s.permutation.row_of_slot[slot], 0);
    }
    for (std::int64_t e = 0; e < dprobs.to.cols; ++e) dprobs.put(t, e, row[static_cast<size_t>(e)]);
  }
}

// inputs rows, row map, whose first k columns are the rows of a token's slots; output y [T, h].
reference::Permutation rows_of_slots(const OpCall& c, ConstValues map, std::int64_t rows) {
  map.cols = top_k_of(c);
  return reference::load_row_map(map, rows);
}
void unpermute_forward(const OpCall& c) {
  const View rows = c.in(0), y = c.out(0);
  const auto p = rows_of_slots(c, values(c.in(1)), rows.rows);
  with_type(y.dtype, [&]<class T>() { reference::combine_forward<T>(p, top_k_of(c), mat<T>(rows), {}, mat<T>(y)); });
}
void unpermute_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  const GradView drows = c.d_in(0);
  const auto p = rows_of_slots(c, values(c.in(1)), drows.to.rows);
  with_type(dy.dtype, [&]<class T>() { reference::combine_backward<T>(p, top_k_of(c), {}, {}, mat<T>(dy), grad<T>(drows), {}); });
}

// Dispatch: inputs rows, prob at home (native: and the first row of every expert); outputs rows, prob at the
// experts (native: and offsets, counts). Combine: input rows at the experts (native: and both sizes), output
// rows at home.
bool on_device(const OpCall& c) { return c.op().inputs.size() > (c.op().kind == model::OpKind::Dispatch ? 2u : 1u); }

std::vector<std::int64_t> numbers(ConstValues v) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < v.rows; ++i)
    for (std::int64_t j = 0; j < v.cols; ++j) out.push_back(static_cast<std::int64_t>(v.get(i, j)));
  return out;
}
void store_numbers(const std::vector<std::int64_t>& from, Values to) {
  for (std::int64_t i = 0; i < to.rows; ++i)
    for (std::int64_t j = 0; j < to.cols; ++j) to.set(i, j, static_cast<double>(from[static_cast<size_t>(i * to.cols + j)]));
}

// Stack megatron keeps [first row of every local expert, counts] of a dispatch on the host.
ExpertRoutes known_routes(const OpCall& c) {
  if (on_device(c)) {
    const bool dispatch = c.op().kind == model::OpKind::Dispatch;
    return ExpertRoutes(c, numbers(values(c.in(dispatch ? 2 : 1))), numbers(values(dispatch ? c.out(3) : c.in(2))));
  }
  const int dispatch = maker_of_rows(c, {model::OpKind::Dispatch}, c.op_index());
  const auto& table = c.host_table(dispatch);
  const int home = maker_of_rows(c, {model::OpKind::Permute}, dispatch);
  return ExpertRoutes(c, c.host_table(home), {table.begin() + c.attr<MoeAttr>().local_experts + 1, table.end()});
}
Bytes exchange_scratch(const model::OpList& list, const model::Op& op, int) {
  const model::Tensor &in = list.tensor(op.inputs[0]), &out = list.tensor(op.outputs[0]);
  const bool dispatch = op.kind == model::OpKind::Dispatch;
  return ExpertRoutes::scratch_bytes(op, dispatch ? in.rows() : out.rows(), dispatch ? out.rows() : in.rows(), in.cols(), in.dtype);
}
std::span<std::byte> exchange_memory(const OpCall& c) { return c.scratch(exchange_scratch(c.list(), c.op(), c.step())); }

void dispatch_forward(const OpCall& c) {
  const ExpertRoutes routes(c, on_device(c) ? numbers(values(c.in(2))) : c.host_table(maker_of_rows(c, {model::OpKind::Permute}, c.op_index())));
  routes.require(c.out(0).rows, c.context().ranks->rank());
  if (on_device(c)) {
    store_numbers(routes.groups(), values(c.out(2)));
    store_numbers(routes.counts(), values(c.out(3)));
  } else {
    std::vector<std::int64_t>& table = c.host_table(c.op_index());
    table = routes.groups();
    table.insert(table.end(), routes.counts().begin(), routes.counts().end());
  }
  for (size_t i = 0; i < 2; ++i) routes.out(c.in(i), {c.out(i), false}, exchange_memory(c));
}
void dispatch_backward(const OpCall& c) {
  const ExpertRoutes routes = known_routes(c);
  for (size_t i = 0; i < 2; ++i) routes.back(c.d_out(i), c.d_in(i), exchange_memory(c));
}
void combine_forward(const OpCall& c) { known_routes(c).back(c.in(0), {c.out(0), false}, exchange_memory(c)); }
void combine_backward(const OpCall& c) { known_routes(c).out(c.d_out(0), c.d_in(0), exchange_memory(c)); }

// -------------------------------------------------------------------------------- experts ----

// First row of every expert, and the end: a tensor in stack native, host data in stack megatron. Rows past
// the end are planned but unused.
std::vector<std::int64_t> groups_of(const OpCall& c) {
  if (c.op().inputs.size() < 2) {
    const auto& table = c.host_table(maker_of_rows(c, {model::OpKind::Permute, model::OpKind::Dispatch}, c.op_index()));
    return {table.begin(), table.begin() + c.attr<MoeAttr>().local_experts + 1};
  }
  const ConstValues offsets = values(c.in(1));
  std::vector<std::int64_t> groups;
  for (std::int64_t i = 0; i < offsets.rows; ++i) groups.push_back(static_cast<std::int64_t>(offsets.get(i, 0)));
  return groups;
}
void grouped_forward(const OpCall& c) {
  const View x = c.in(0), y = c.out(0);
  const auto groups = groups_of(c);
  const auto experts = static_cast<std::int64_t>(groups.size()) - 1;
  with_type(x.dtype, [&]<class T>() {
    reference::grouped_linear_forward<T>(mat<T>(x), mat<T>(c.param(0, experts * y.cols, x.cols)), groups, mat<T>(y));
  });
}
void grouped_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  const auto groups = groups_of(c);
  const auto experts = static_cast<std::int64_t>(groups.size()) - 1;
  const std::int64_t in = c.list().tensor(c.op().inputs[0]).cols();
  with_type(dy.dtype, [&]<class T>() {
    if (!c.backward_step().grad_writes.empty())
      if (GradView dx = c.d_in(0))
        reference::grouped_linear_dgrad<T>(mat<T>(dy), mat<T>(c.param(0, experts * dy.cols, in)), groups, grad<T>(dx));
    if (!c.backward_step().param_grads.empty()) {
      const View x = c.in(0);
      if (View dw = c.param_grad(0, experts * dy.cols, in))
        reference::grouped_linear_wgrad<T>(mat<T>(dy), mat<T>(x), groups, mat<Acc<T>>(dw));
    }
  });
}

// inputs fc1 [rows, 2 f], prob [rows]; output act [rows, f]. SwiGlu: without the probability.
template <bool Weighted> void swiglu_forward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::swiglu_forward<T>(mat<T>(c.in(0)), Weighted ? ConstValues(values(c.in(1))) : ConstValues(), mat<T>(c.out(0)));
  });
}
template <bool Weighted> void swiglu_backward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::swiglu_backward<T>(mat<T>(c.in(0)), Weighted ? ConstValues(values(c.in(1))) : ConstValues(), mat<T>(c.d_out(0)),
                                  grad<T>(c.d_in(0)), Weighted ? values_grad(c.d_in(1)) : reference::ValuesGrad());
  });
}

// ---------------------------------------------------------------------------- shared gate ----

// inputs x, y [T, h]; outputs gated, score [T] = x . w (before the sigmoid); parameter w [1, h].
Bytes shared_gate_scratch(const model::OpList& list, const model::Op& op, int step) {
  return step < 0 ? 0 : list.tensor(op.inputs[0]).rows() * size_of(accumulator(list.tensor(op.inputs[0]).dtype)); // gradient of the score
}
void shared_gate_forward(const OpCall& c) {
  const View x = c.in(0), score = c.out(1);
  with_type(x.dtype, [&]<class T>() {
    reference::linear_forward<T, T>(mat<T>(x), mat<T>(c.param(0, 1, x.cols)), {}, mat<T>(score));
    reference::row_gate_forward<T>(mat<T>(c.in(1)), values(score), mat<T>(c.out(0)));
  });
}
void shared_gate_backward(const OpCall& c) {
  const View x = c.in(0);
  const View dscore{c.scratch(shared_gate_scratch(c.list(), c.op(), c.step())).data(), accumulator(x.dtype), x.rows, 1, 1};
  with_type(x.dtype, [&]<class T>() {
    reference::row_gate_backward<T>(mat<T>(c.in(1)), values(c.out(1)), mat<T>(c.d_out(0)), grad<T>(c.d_in(1)),
                                    values_grad({dscore, false}));
    if (GradView dx = c.d_in(0)) reference::linear_dgrad<T, Acc<T>>(mat<Acc<T>>(dscore), mat<T>(c.param(0, 1, x.cols)), grad<T>(dx));
    if (View dw = c.param_grad(0, 1, x.cols)) reference::linear_wgrad<T, Acc<T>>(mat<Acc<T>>(dscore), mat<T>(x), mat<Acc<T>>(dw));
  });
}

} // namespace

std::span<const Entry> moe_ops() {
  static const Entry ops[] = {
      {model::OpKind::Router, {router_forward, router_backward, router_scratch}},
      {model::OpKind::Permute, {permute_forward, permute_backward}},
      {model::OpKind::Dispatch, {dispatch_forward, dispatch_backward, exchange_scratch}},
      {model::OpKind::GroupedLinear, {grouped_forward, grouped_backward}},
      {model::OpKind::SwiGluProb, {swiglu_forward<true>, swiglu_backward<true>}},
      {model::OpKind::CombineDispatch, {combine_forward, combine_backward, exchange_scratch}},
      {model::OpKind::Unpermute, {unpermute_forward, unpermute_backward}},
      {model::OpKind::SwiGlu, {swiglu_forward<false>, swiglu_backward<false>}},
      {model::OpKind::SharedGate, {shared_gate_forward, shared_gate_backward, shared_gate_scratch}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
