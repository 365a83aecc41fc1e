#include "model/upstream.h"

#include <set>
#include <string>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::model {

namespace upstream {

Bytes touched(const OpList& list, const Op& op, int step) {
  Bytes bytes = 0, weights = 0;
  for (const ParamRef& p : op.params) weights += p.elements * size_of(p.dtype);
  auto once = [&](const std::vector<TensorId>& first, const std::vector<TensorId>& second) { // each tensor of both
    auto at = [&](size_t i) { return i < first.size() ? first[i] : second[i - first.size()]; };
    for (size_t i = 0; i < first.size() + second.size(); ++i) {
      bool seen = false;
      for (size_t k = 0; k < i; ++k) seen = seen || at(k) == at(i);
      if (!seen) bytes += list.tensor(at(i)).bytes();
    }
  };
  if (is_forward(step)) {
    once(op.inputs, op.outputs);
    bytes += weights;
  } else {
    const Step& s = step_of(op, step);
    once(s.reads, {});
    once(s.grad_reads, s.grad_writes);
    if (!s.grad_writes.empty()) bytes += weights;
    for (int p : s.param_grads) bytes += 8 * op.params[static_cast<size_t>(p)].elements;
  }
  return bytes;
}

Work memory_bound(const OpList& list, const Op& op, int step, Family family, Bytes scratch, int kernels, double passes) {
  const double traffic = static_cast<double>(touched(list, op, step)) * passes;
  return {.scratch = scratch, .traffic = static_cast<Bytes>(traffic), .family = family, .size = traffic, .kernels = kernels};
}

namespace {

Work nothing(const OpList&, const Op&, int) { return {.kernels = 0}; }

// One kernel, or what torch.compile makes one.
Work elementwise(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Elementwise); }

// Names in forward; `torch.cat` of the sections in backward.
Work view(const OpList& list, const Op& op, int step) {
  return is_forward(step) ? nothing(list, op, step) : elementwise(list, op, step);
}

// Index-select copy, exchange, concatenation that undoes the zig-zag order: three buffers of the
// tensor's size beside it, and two copies.
Work all_to_all(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Permute, 3 * list.tensor(op.inputs[0]).bytes(), 2, 2);
}

// The collective works rank by rank; columns are put side by side (or taken apart) by one more copy.
Work gather_columns(const OpList& list, const Op& op, int step) {
  const bool copies = is_forward(step) || !step_of(op, step).collectives.empty();
  return memory_bound(list, op, step, Family::Permute, copies ? list.tensor(op.outputs[0]).bytes() : 0, 1, 2);
}

// Sigmoid of one product a row, then the product of both.
Work shared_gate(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Elementwise, 0, is_forward(step) ? 3 : 5);
}

} // namespace

const std::vector<Entry>& entries() {
  static const std::vector<Entry> table{
      {OpKind::Data, nothing, ""},
      {OpKind::View, view, ""},
      {OpKind::Copy, elementwise, ""},
      {OpKind::ResidualAdd, elementwise, ""},
      {OpKind::AllToAll, all_to_all, ""},
      {OpKind::AllGather, gather_columns, ""},
      {OpKind::ReduceScatter, elementwise, ""},
      {OpKind::AllReduce, elementwise, ""},
      {OpKind::RmsNorm, norm, ""},
      {OpKind::Linear, linear, ""},
      {OpKind::ConvSilu, conv, ""},
      {OpKind::Conv, conv, ""},
      {OpKind::Silu, elementwise, ""},
      {OpKind::L2Norm, l2_norm, ""},
      {OpKind::ExpandHeads, elementwise, ""},
      {OpKind::Gates, elementwise, ""},
      {OpKind::Rule, rule, ""},
      {OpKind::Gdn2Gates, gdn2_gates, ""},
      {OpKind::Gdn2Rule, gdn2_rule, ""},
      {OpKind::GatedNorm, gated_norm, ""},
      {OpKind::GdnPre, gdn_pre, ""},
      {OpKind::HeadNorm, norm, ""},
      {OpKind::Rope, elementwise, ""},
      {OpKind::CoreAttention, core_attention, ""},
      {OpKind::OutputGate, elementwise, ""},
      {OpKind::Router, router, ""},
      {OpKind::Permute, permute, ""},
      {OpKind::Dispatch, exchange_rows, ""},
      {OpKind::GroupedLinear, grouped_linear, ""},
      {OpKind::SwiGluProb, elementwise, ""},
      {OpKind::CombineDispatch, exchange_rows, ""},
      {OpKind::Unpermute, unpermute, ""},
      {OpKind::SwiGlu, elementwise, ""},
      {OpKind::SharedGate, shared_gate, ""},
      {OpKind::Embedding, embedding, ""},
      {OpKind::Concat, elementwise, ""},
      {OpKind::LmHead, linear, ""},
      {OpKind::CrossEntropy, cross_entropy, ""},
      {OpKind::LinearCrossEntropy, linear_cross_entropy, ""},
      {OpKind::LossSum, elementwise, ""},
      {OpKind::Gdn2Pre, gdn_pre, ""},
      {OpKind::AttentionPre, attention_pre, ""},
      {OpKind::TopK, compact_router, ""},
      {OpKind::RouterLoss, compact_router, ""},
      {OpKind::Sort, sort_slots, ""},
      {OpKind::Gather, unpermute, ""},
      {OpKind::SharedScore, shared_score, ""},
      {OpKind::Toy, elementwise, ""}};
  return table;
}

} // namespace upstream

namespace {

class Upstream final : public Provider {
public:
  std::string_view name() const override { return "upstream"; }
  Work work(const OpList& list, const Op& op, int step) const override {
    const upstream::Entry& entry = upstream::entries()[static_cast<size_t>(op.kind)];
    if (!entry.work)
      throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: upstream runs no op of kind '{}': {}", list.name, op.name,
                                                   name_of(op.kind), entry.reason));
    return entry.work(list, op, step);
  }
};

} // namespace

const Provider& upstream_provider() {
  static const Upstream provider;
  return provider;
}

} // namespace gdn::model
