#include "program/passes.h"

#include <algorithm>
#include <numeric>

namespace gdn::program {

using model::Op;
using model::Step;
using model::StorageId;
using model::TensorId;

Passes::Passes(const model::OpList& list, const std::vector<Span>& spans, bool input_gradient, bool backward)
    : list_(list), spans_(spans), makers_(producers(list)) {
  mark_required(input_gradient);
  runs_.resize(list.ops.size());
  aliases_.resize(list.ops.size());
  if (backward) mark_running();
  else
    for (size_t i = 0; i < list.ops.size(); ++i) runs_[i].assign(list.ops[i].steps.size(), 0);
  plan_replays();
}

size_t Passes::root(TensorId t) const {
  while (list_.tensor(t).base >= 0 && list_.tensor(t).gradient == model::GradientStorage::Slice)
    t = list_.tensor(t).base;
  return static_cast<size_t>(t);
}

void Passes::mark_required(bool input_gradient) {
  required_.assign(list_.tensors.size(), false);
  auto need = [&](TensorId t) {
    for (; t >= 0; t = list_.tensor(t).base)
      if (required_[static_cast<size_t>(t)]) return true;
    return false;
  };
  if (list_.input >= 0) required_[static_cast<size_t>(list_.input)] = input_gradient;
  for (const Op& o : list_.ops) {
    bool any = std::any_of(o.params.begin(), o.params.end(), [](const auto& p) { return p.trainable; });
    for (TensorId t : o.inputs) any = any || (list_.tensor(t).differentiable && need(t));
    for (TensorId t : o.outputs) required_[static_cast<size_t>(t)] = any && list_.tensor(t).differentiable;
  }
  for (size_t t = 0; t < required_.size(); ++t) required_[t] = need(static_cast<TensorId>(t));
}

void Passes::mark_running() {
  std::vector<bool> reached(list_.tensors.size(), false); // per gradient root
  if (list_.output >= 0) reached[root(list_.output)] = required_[static_cast<size_t>(list_.output)];
  for (size_t i = list_.ops.size(); i-- > 0;) {
    const Op& o = list_.ops[i];
    for (const Step& s : o.steps) {
      const bool arrives = s.grad_reads.empty() || std::any_of(s.grad_reads.begin(), s.grad_reads.end(),
                                                               [&](TensorId t) { return reached[root(t)]; });
      runs_[i].push_back(arrives && wanted(o, s));
      if (!runs_[i].back()) continue;
      for (TensorId t : s.grad_writes)
        if (required_[static_cast<size_t>(t)]) reached[root(t)] = true;
    }
    for (const Op::GradAlias& a : o.grad_aliases)
      if (required_[static_cast<size_t>(a.input)] && reached[root(a.output)]) reached[root(a.input)] = aliases_[i] = true;
  }
}

bool Passes::wanted(const Op& o, const Step& s) const {
  return std::any_of(s.param_grads.begin(), s.param_grads.end(),
                     [&](int p) { return o.params[static_cast<size_t>(p)].trainable; }) ||
         std::any_of(s.grad_writes.begin(), s.grad_writes.end(),
                     [&](TensorId t) { return required_[static_cast<size_t>(t)]; });
}

bool Passes::runs(int op) const {
  const std::vector<char>& steps = runs_[static_cast<size_t>(op)];
  return std::find(steps.begin(), steps.end(), 1) != steps.end();
}

// Calls `use` on every tensor that the backward of op `index` keeps: what running steps read, and pins.
template <class Use>
void Passes::for_each_saved(int index, Use use) const {
  const Op& o = op(index);
  if (!runs(index)) return;
  for (size_t i = 0; i < o.steps.size(); ++i)
    if (runs(index, i)) {
      std::for_each(o.steps[i].reads.begin(), o.steps[i].reads.end(), use);
      for (TensorId t : o.steps[i].grad_writes)
        if (overwritten(t)) use(t);
    }
  for (const model::Pin& p : o.pins) use(p.tensor);
}

// Whether the backward of an op outside the span keeps the storage of t.
bool Passes::saved_outside(const Span& s, TensorId t) const {
  bool saved = false;
  for (int i = 0; i < static_cast<int>(list_.ops.size()); ++i)
    if (i < s.first || i > s.last)
      for_each_saved(i, [&](TensorId r) { saved = saved || list_.tensor(r).storage == list_.tensor(t).storage; });
  return saved;
}

// Later spans first: an earlier one makes again what their replays read.
void Passes::plan_replays() {
  replays_.resize(spans_.size());
  std::vector<size_t> order(spans_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return spans_[x].first > spans_[y].first; });
  for (size_t i : order) {
    replays_[i].runs = is_replayed(spans_[i]);
    if (replays_[i].runs && spans_[i].extent == ReplayExtent::Needed) replays_[i].needed = needed_ops(spans_[i]);
  }
}

// Not when no gradient passes the span (frozen layers) and nobody wants its outputs again.
bool Passes::is_replayed(const Span& s) const {
  for (int i = s.first; i <= s.last; ++i)
    if (runs(i) || aliases_[static_cast<size_t>(i)]) return true;
  if (s.kind == SpanKind::WholeBlock) return false;
  const std::vector<TensorId> outputs = span_outputs(list_, s);
  return std::any_of(outputs.begin(), outputs.end(), [&](TensorId t) { return wanted_outside(s, t); });
}

// Whether the backward of an op outside the span, or the replay of a later span, reads the storage of t.
bool Passes::wanted_outside(const Span& s, TensorId t) const {
  return saved_outside(s, t) || std::any_of(spans_.begin(), spans_.end(), [&](const Span& later) {
           return later.first > s.last && replays(later) && replay_reads(later, list_.tensor(t).storage);
         });
}

bool Passes::replay_reads(const Span& s, StorageId storage) const {
  const std::vector<char>& run = needed(s);
  for (int i = s.first; i <= s.last; ++i)
    if (!op(i).effects && (run.empty() || run[static_cast<size_t>(i)]))
      for (TensorId t : op(i).inputs)
        if (list_.tensor(t).storage == storage) return true;
  return false;
}

// Ops of the span that make what the backward of its ops keeps, what is wanted outside of a discarded output, or what
// another needed op reads. An inner span that replays everything runs whole wherever it runs.
std::vector<char> Passes::needed_ops(const Span& s) const {
  std::vector<char> needed(list_.ops.size(), 0), wanted(list_.tensors.size(), 0);
  auto want = [&](TensorId t) { // a view that no op introduces is another name of its base
    for (; t >= 0; t = list_.tensor(t).base) {
      wanted[static_cast<size_t>(t)] = 1;
      const int base = list_.tensor(t).base;
      if (base < 0 || makers_[static_cast<size_t>(t)] != makers_[static_cast<size_t>(base)]) break;
    }
  };
  for (int i = s.first; i <= s.last; ++i) for_each_saved(i, want);
  if (s.kind == SpanKind::DiscardOutput)
    for (TensorId t : span_outputs(list_, s))
      if (wanted_outside(s, t)) want(t);
  for (int i = s.last; i >= s.first; --i) {
    const bool whole = std::any_of(spans_.begin(), spans_.end(), [&](const Span& inner) {
      return &inner != &s && inner.extent == ReplayExtent::All && inner.first >= s.first && inner.last <= s.last &&
             i >= inner.first && i <= inner.last && (inner.first != s.first || inner.last != s.last || &inner > &s);
    });
    const Op& o = op(i);
    if (whole || std::any_of(o.outputs.begin(), o.outputs.end(), [&](TensorId t) { return wanted[static_cast<size_t>(t)]; })) {
      needed[static_cast<size_t>(i)] = 1;
      std::for_each(o.inputs.begin(), o.inputs.end(), want);
    }
  }
  return needed;
}

} // namespace gdn::program
