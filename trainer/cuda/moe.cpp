#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "kernels/common/check.h"
#include "kernels/common/elementwise.h"
#include "kernels/common/reduce.h"
#include "kernels/gemm/grouped_gemm.h"
#include "kernels/moe/rows.h"
#include "kernels/moe/shared_gate.h"
#include "kernels/moe/sort.h"
#include "kernels/moe/swiglu.h"
#include "trainer/comm/ranks.h"
#include "trainer/cuda/experts.h"
#include "trainer/cuda/routing.h"

namespace gdn::trainer::cuda {

using model::MoeAttr;

namespace {

// --------------------------------------------------------------------------------- router ----

// Scores are kept for the chosen k where the weights are a softmax over them, else for all experts.
bool keeps_chosen(const MoeAttr& a) { return a.renormalise; }

// Slots of all ranks that share the tokens are no tensor of the stack: the forward leaves them where its backward finds them.
void sum_counts(const OpCall& c, Engine& e, std::int32_t* counts) {
  if (c.op().collectives.empty()) return;
  const auto experts = static_cast<size_t>(c.attr<MoeAttr>().experts);
  for (const model::Collective& sum : c.op().collectives)
    c.group(sum.group).all_reduce(reinterpret_cast<std::byte*>(counts), static_cast<std::int64_t>(experts), DType::Int32);
  GDN_CUDA(cudaMemcpyAsync(e.table(c, c.op_index()), counts, experts * 4, cudaMemcpyDeviceToDevice, e.stream));
}

// inputs logits [T, E]; outputs probs, map [T, E], scores, top indices twice, scores of the auxiliary loss.
void router_forward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  LaunchContext context = e.launch(c);
  kernels::RouteForwardParams p;
  p.route = route_of(a);
  p.logits = matrix(c.in(0));
  p.probs = matrix(c.out(0));
  p.map = matrix(c.out(1));
  (keeps_chosen(a) ? p.weights : p.scores[0]) = matrix(c.out(2));
  p.experts[0] = matrix(c.out(3));
  p.experts[1] = matrix(c.out(4));
  if (a.aux_coeff > 0) p.scores[1] = matrix(c.out(5));
  kernels::route_forward(p, context);
  auto* const counts = static_cast<std::int32_t*>(take(context, a.experts * 4));
  kernels::count_slots(p.experts[0], static_cast<int>(a.experts), counts, context);
  sum_counts(c, e, counts);
  add_routing_totals(c, e, p.logits, counts, !c.op().collectives.empty(), context.scratch);
}

void router_backward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  LaunchContext context = e.launch(c);
  kernels::RouteBackwardParams p;
  p.route = route_of(a);
  const View kept = c.out(2), experts = c.out(3);
  const std::int64_t tokens = experts.rows * token_shards(c);
  c.out(4); // the indices of the scatter, equal to those of the choice
  (keeps_chosen(a) ? p.weights : p.scores) = matrix(kept);
  p.experts = matrix(experts);
  if (const View d = c.d_out_if_any(0)) p.d_probs = matrix(d);
  auto* const counts = static_cast<std::int32_t*>(take(context, a.experts * 4));
  if (a.aux_coeff > 0) {
    p.scores = matrix(c.out(5));
    if (c.op().collectives.empty()) kernels::count_slots(p.experts, static_cast<int>(a.experts), counts, context);
    p.counts = c.op().collectives.empty() ? counts : e.table(c, c.op_index());
    p.balance = static_cast<float>(balance_factor(a, tokens) * c.context().aux_scale);
  }
  if (a.z_coeff > 0) {
    p.logits = matrix(c.in(0));
    p.z = static_cast<float>(2 * a.z_coeff / static_cast<double>(tokens) * c.context().aux_scale);
  }
  p.d_logits = gradient(c.d_in(0));
  kernels::route_backward(p, context);
}

// ---------------------------------------------------------------------------- permutation ----

// The row map: per token the rows of its slots, then (fused form, 2 E + 1 wide) their experts.
Matrix slots_of(const View& row_map, std::int64_t first, std::int64_t k) {
  Matrix m = matrix(row_map);
  m.data = row_map.data + first * size_of(row_map.dtype);
  m.cols = k;
  return m;
}

// Rows per expert are outside the tensors of the stack: the op that permutes or dispatches them leaves them, the ops on
// its rows find them.
int maker_of_rows(const OpCall& c, bool dispatched, int at) {
  auto makes = [&](const model::Op& op) {
    return dispatched && !op.collectives.empty() ? op.kind == model::OpKind::Dispatch : op.kind == model::OpKind::Permute;
  };
  while (at >= 0 && !makes(c.list().ops[static_cast<size_t>(at)])) at = c.list().producer(c.list().ops[static_cast<size_t>(at)].inputs.at(0));
  if (at < 0) throw Error(ErrorCode::Internal, fmt::format("{}: its rows come from no permutation", c.name()));
  return at;
}

// inputs x [T, h], probs, map [T, E]; outputs rows, prob of each row, row map.
void permute_forward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<MoeAttr>();
  const View rows = c.out(0), prob = c.out(1), row_map = c.out(2);
  LaunchContext context = e.launch(c);
  auto* const counts = static_cast<std::int32_t*>(take(context, a.experts * 4));
  const bool fused = row_map.cols > a.top_k;
  const Matrix experts{context.scratch, DType::Int32, row_map.rows, a.top_k, a.top_k};
  const Matrix slots = slots_of(row_map, 0, a.top_k);
  kernels::experts_of_map(matrix(c.in(2)), experts, context);
  kernels::sort_slots({experts, static_cast<int>(a.experts), 0, slots, counts, e.table(c, c.op_index())}, context);
  if (fused) kernels::copy_indices(experts, slots_of(row_map, a.top_k, row_map.cols - a.top_k), context);
  if (rows.rows != row_map.rows * a.top_k) { // planned rows that nobody needs
    kernels::fill({matrix(rows), false}, 0, context);
    kernels::fill({matrix(prob), false}, 0, context);
  }
  kernels::spread_rows(matrix(c.in(0)), slots, {matrix(rows), false}, context);
  kernels::weights_to_rows(slots, {}, matrix(c.in(1)), experts, matrix(prob), context);
}
void permute_backward(const OpCall& c, Engine& e) {
  const std::int64_t k = c.attr<MoeAttr>().top_k;
  const View row_map = c.out(2);
  const Matrix slots = slots_of(row_map, 0, k);
  const View drows = c.d_out(0), dprob = c.d_out(1);
  if (const GradView dx = c.d_in(0)) kernels::collect_rows(matrix(drows), slots, gradient(dx), e.launch());
  kernels::weights_from_rows_dense(slots, matrix(dprob), row_map.cols > k ? slots_of(row_map, k, k) : Matrix{},
                                   e.table(c, c.op_index()), gradient(c.d_in(1)), e.launch());
}

// inputs rows, row map, whose first k columns are the rows of a token's slots; output y [T, h].
void unpermute_forward(const OpCall& c, Engine& e) {
  kernels::collect_rows(matrix(c.in(0)), slots_of(c.in(1), 0, c.attr<MoeAttr>().top_k), {matrix(c.out(0)), false}, e.launch());
}
void unpermute_backward(const OpCall& c, Engine& e) {
  const View row_map = c.in(1);
  const std::int64_t k = c.attr<MoeAttr>().top_k;
  const GradView drows = c.d_in(0);
  if (!drows.accumulate && (c.attr<MoeAttr>().capacity > 0 || drows.to.rows != row_map.rows * k))
    kernels::fill({matrix(drows.to), false}, 0, e.launch());
  kernels::spread_rows(matrix(c.d_out(0)), slots_of(row_map, 0, k), gradient(drows), e.launch());
}

// Dispatch: inputs rows, prob at home (native: and the first row of every expert); outputs rows, prob at the experts
// (native: and offsets, counts). Combine: input rows at the experts (native: and both sizes), output rows at home. On one
// expert rank the rows are where they must be: exchanges copy.
bool on_device(const OpCall& c) { return c.op().inputs.size() > (c.op().kind == model::OpKind::Dispatch ? 2u : 1u); }

std::vector<std::int64_t> numbers(const std::int32_t* from, std::int64_t n, Engine& e) {
  std::vector<std::int32_t> host(static_cast<size_t>(n));
  GDN_CUDA(cudaMemcpyAsync(host.data(), from, host.size() * 4, cudaMemcpyDeviceToHost, e.stream));
  GDN_CUDA(cudaStreamSynchronize(e.stream));
  return {host.begin(), host.end()};
}
void store(const std::vector<std::int64_t>& from, std::int32_t* to, Engine& e) {
  const std::vector<std::int32_t> narrow(from.begin(), from.end());
  GDN_CUDA(cudaMemcpyAsync(to, narrow.data(), narrow.size() * 4, cudaMemcpyHostToDevice, e.stream));
}

int dispatch_of(const OpCall& c) {
  int at = c.op_index();
  while (at >= 0 && c.list().ops[static_cast<size_t>(at)].kind != model::OpKind::Dispatch) at = c.list().producer(c.list().ops[static_cast<size_t>(at)].inputs.at(0));
  if (at < 0) throw Error(ErrorCode::Internal, fmt::format("{}: its rows come from no dispatch", c.name()));
  return at;
}
ExpertRoutes known_routes(const OpCall& c, Engine& e) {
  if (on_device(c)) { // what the host knows of them is what the dispatch read
    const bool dispatch = c.op().kind == model::OpKind::Dispatch;
    c.in(dispatch ? 2 : 1);
    if (dispatch) c.out(3);
    else c.in(2);
  }
  return ExpertRoutes::known(c, e, dispatch_of(c));
}

void dispatch_forward(const OpCall& c, Engine& e) {
  if (c.op().collectives.empty()) {
    for (size_t i = 0; i < c.op().inputs.size(); ++i) kernels::copy(matrix(c.in(i)), {matrix(c.out(i)), false}, e.launch());
    return;
  }
  const std::int32_t* offsets = on_device(c) ? data<std::int32_t>(c.in(2)) : e.table(c, maker_of_rows(c, false, c.op_index()));
  const ExpertRoutes routes(c, e, numbers(offsets, c.attr<MoeAttr>().experts + 1, e));
  routes.require(c.out(0).rows, c.context().ranks->rank());
  routes.keep(c);
  store(routes.groups(), on_device(c) ? data<std::int32_t>(c.out(2)) : e.table(c, c.op_index()), e);
  if (on_device(c)) store(routes.counts(), data<std::int32_t>(c.out(3)), e);
  for (size_t i = 0; i < 2; ++i) routes.out(c.in(i), {c.out(i), false});
}
void dispatch_backward(const OpCall& c, Engine& e) {
  if (c.op().collectives.empty()) {
    for (size_t i = 0; i < c.op().inputs.size(); ++i) kernels::copy(matrix(c.d_out(i)), gradient(c.d_in(i)), e.launch());
    return;
  }
  const ExpertRoutes routes = known_routes(c, e);
  for (size_t i = 0; i < 2; ++i) routes.back(c.d_out(i), c.d_in(i));
}
void combine_forward(const OpCall& c, Engine& e) {
  if (c.op().collectives.empty()) return kernels::copy(matrix(c.in(0)), {matrix(c.out(0)), false}, e.launch());
  known_routes(c, e).back(c.in(0), {c.out(0), false});
}
void combine_backward(const OpCall& c, Engine& e) {
  if (c.op().collectives.empty()) return kernels::copy(matrix(c.d_out(0)), gradient(c.d_in(0)), e.launch());
  known_routes(c, e).out(c.d_out(0), c.d_in(0));
}

// -------------------------------------------------------------------------------- experts ----

// First row of every expert, and the end: a tensor in stack native.
kernels::Groups groups_of(const OpCall& c, Engine& e) {
  const int experts = static_cast<int>(c.attr<MoeAttr>().local_experts);
  return {experts, c.op().inputs.size() < 2 ? e.table(c, maker_of_rows(c, true, c.op_index())) : data<std::int32_t>(c.in(1))};
}
void grouped_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), y = c.out(0);
  const kernels::Groups groups = groups_of(c, e);
  kernels::grouped_forward(groups, matrix(x), matrix(c.param(0, groups.experts * y.cols, x.cols)), {matrix(y), false}, e.launch());
}
void grouped_backward(const OpCall& c, Engine& e) {
  const View dy = c.d_out(0);
  const kernels::Groups groups = groups_of(c, e);
  const std::int64_t in = c.list().tensor(c.op().inputs[0]).cols();
  if (!c.backward_step().grad_writes.empty())
    if (const GradView dx = c.d_in(0))
      kernels::grouped_dgrad(groups, matrix(dy), matrix(c.param(0, groups.experts * dy.cols, in)), gradient(dx), e.launch());
  if (!c.backward_step().param_grads.empty()) {
    const View x = c.in(0);
    if (const View dw = c.param_grad(0, groups.experts * dy.cols, in)) kernels::grouped_wgrad(groups, matrix(dy), matrix(x), matrix(dw), e.launch());
  }
}

// inputs fc1 [rows, 2 f], prob [rows]; output act [rows, f]. SwiGlu: without the probability.
template <bool kWeighted> void swiglu_forward(const OpCall& c, Engine& e) {
  kernels::swiglu_forward(matrix(c.in(0)), kWeighted ? matrix(c.in(1)) : Matrix{}, matrix(c.out(0)), e.launch());
}
template <bool kWeighted> void swiglu_backward(const OpCall& c, Engine& e) {
  kernels::swiglu_backward(matrix(c.in(0)), kWeighted ? matrix(c.in(1)) : Matrix{}, matrix(c.d_out(0)), gradient(c.d_in(0)),
                           kWeighted ? gradient(c.d_in(1)) : Gradient{}, e.launch());
}

// ---------------------------------------------------------------------------- shared gate ----

// inputs x, y [T, h]; outputs gated, score [T] = x . w (before the sigmoid); parameter w [1, h].
void shared_gate_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), score = c.out(1);
  kernels::row_score(matrix(x), matrix(c.param(0, 1, x.cols)), false, matrix(score), e.launch());
  kernels::row_gate_forward(matrix(c.in(1)), matrix(score), matrix(c.out(0)), e.launch());
}
void shared_gate_backward(const OpCall& c, Engine& e) {
  const View x = c.in(0);
  LaunchContext context = e.launch(c);
  const Matrix d{take(context, x.rows * 4), DType::FP32, x.rows, 1, 1};
  kernels::row_gate_backward(matrix(c.in(1)), matrix(c.out(1)), matrix(c.d_out(0)), gradient(c.d_in(1)), d, context);
  if (const GradView dx = c.d_in(0)) kernels::outer(d, matrix(c.param(0, 1, x.cols)), gradient(dx), context);
  if (const View dw = c.param_grad(0, 1, x.cols)) kernels::column_sums(matrix(x), d, data<float>(dw), context);
}

} // namespace

std::span<const Entry> moe_ops() {
  static const Entry ops[] = {
      {model::OpKind::Router, {router_forward, router_backward}},
      {model::OpKind::Permute, {permute_forward, permute_backward}},
      {model::OpKind::Dispatch, {dispatch_forward, dispatch_backward}},
      {model::OpKind::GroupedLinear, {grouped_forward, grouped_backward}},
      {model::OpKind::SwiGluProb, {swiglu_forward<true>, swiglu_backward<true>}},
      {model::OpKind::CombineDispatch, {combine_forward, combine_backward}},
      {model::OpKind::Unpermute, {unpermute_forward, unpermute_backward}},
      {model::OpKind::SwiGlu, {swiglu_forward<false>, swiglu_backward<false>}},
      {model::OpKind::SharedGate, {shared_gate_forward, shared_gate_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
