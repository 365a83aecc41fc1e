#include "tests/program/meaning.h"

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::brute {

using namespace gdn::model;

Meaning::Meaning(const OpList& list, const std::vector<Span>& spans, const program::TraceOptions& options)
    : list(list), spans(spans), options(options) {
  name_makers();
  for (const Span& s : spans) outputs_.push_back(find_outputs(s));
  check_spans();
  std::vector<int> all;
  for (size_t i = 0; i < spans.size(); ++i) all.push_back(static_cast<int>(i));
  forest = nest(0, op_count() - 1, all);
  mark_required();
  plan_backward();
  // From the end of the list: what a replay reads, an earlier span's replay has to make.
  replays_.resize(spans.size());
  executed_.resize(spans.size());
  for (int first = op_count(); first-- > 0;)
    for (const Span& s : spans)
      if (s.first == first) {
        replays_[index(s)] = find_replays(s);
        executed_[index(s)] = find_executed(s);
      }
}

void Meaning::name_makers() {
  std::vector<int> by_op(list.tensors.size(), -1);
  for (int i = 0; i < op_count(); ++i)
    for (TensorId t : op(i).outputs) at(by_op, t) = i;
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    TensorId t = static_cast<TensorId>(i);
    while (at(by_op, t) < 0 && list.tensor(t).base >= 0) t = list.tensor(t).base;
    listed_.push_back(t);
    makers_.push_back(at(by_op, t));
  }
}

TensorId Meaning::gradient_root(TensorId t) const {
  while (list.tensor(t).base >= 0 && list.tensor(t).gradient == GradientStorage::Slice) t = list.tensor(t).base;
  return t;
}

std::vector<TensorId> Meaning::read_by(const Step& s) const {
  std::vector<TensorId> out = s.reads;
  for (TensorId t : s.grad_writes)
    if (list.tensor(t).gradient == GradientStorage::Overwrite) out.push_back(t);
  return out;
}

std::vector<TensorId> Meaning::saved(int op_index) const {
  std::vector<TensorId> out;
  if (!options.backward) return out;
  for (size_t i = 0; i < op(op_index).steps.size(); ++i)
    if (at(step_runs, op_index)[i])
      for (TensorId t : read_by(op(op_index).steps[i])) out.push_back(t);
  if (runs(op_index))
    for (const Pin& p : op(op_index).pins) out.push_back(p.tensor);
  return out;
}

// Whether the backward of an op outside the span wants the storage of `t`.
bool Meaning::saved_outside(const Span& s, TensorId t) const {
  for (int i = 0; i < op_count(); ++i)
    if (i < s.first || i > s.last)
      for (TensorId r : saved(i))
        if (storage(r) == storage(t)) return true;
  return false;
}

bool Meaning::wanted_outside(const Span& s, TensorId t) const {
  if (saved_outside(s, t)) return true;
  for (const Span& other : spans)
    for (int i = other.first; other.first > s.last && i <= other.last; ++i)
      if (replays(other) && at(executed(other), i))
        for (TensorId r : op(i).inputs)
          if (storage(r) == storage(t)) return true;
  return false;
}

std::vector<TensorId> Meaning::find_outputs(const Span& s) const {
  std::vector<TensorId> out;
  auto offer = [&](TensorId t) {
    if (int m = maker(t); m >= s.first && m <= s.last && !contains(out, t)) out.push_back(t);
  };
  for (int i = s.last + 1; i < op_count(); ++i) std::for_each(op(i).inputs.begin(), op(i).inputs.end(), offer);
  if (list.output >= 0) offer(list.output);
  return out;
}

bool Meaning::find_replays(const Span& s) const {
  for (int i = s.first; i <= s.last; ++i)
    if (runs(i) || contains(at(alias_runs, i), true)) return true;
  if (s.kind == SpanKind::DiscardOutput)
    for (TensorId t : outputs(s))
      if (wanted_outside(s, t)) return true;
  return false;
}

std::vector<char> Meaning::find_executed(const Span& s) const {
  std::vector<char> out(list.ops.size(), 0);
  std::set<TensorId> wanted;
  auto want = [&](TensorId t) { wanted.insert(listed(t)); };
  for (int i = s.first; i <= s.last; ++i)
    for (TensorId t : saved(i)) want(t);
  if (s.kind == SpanKind::DiscardOutput)
    for (TensorId t : outputs(s))
      if (wanted_outside(s, t)) want(t);
  for (int i = s.last; i >= s.first; --i) {
    bool run = s.extent == ReplayExtent::All;
    for (const Span& inner : spans) // an inner span that replays everything runs whole wherever it runs
      if (&inner != &s && inner.extent == ReplayExtent::All && inside(inner, s) && i >= inner.first && i <= inner.last) run = true;
    for (TensorId t : op(i).outputs) run = run || wanted.count(t);
    if (run) std::for_each(op(i).inputs.begin(), op(i).inputs.end(), want);
    at(out, i) = run && !op(i).effects;
  }
  return out;
}

std::set<StorageId> Meaning::touched(int i, const std::vector<char>& executes) const {
  std::set<StorageId> out;
  if (!at(executes, i)) return out;
  for (TensorId t : op(i).inputs) out.insert(storage(t));
  for (TensorId t : op(i).outputs) out.insert(storage(t));
  return out;
}

std::set<StorageId> Meaning::wanted_again(int i, const Span& outer) const {
  std::set<StorageId> out;
  auto add = [&](TensorId t) {
    if (maker(t) < outer.first) out.insert(storage(t));
  };
  for (const Span& s : spans) {
    if (i < s.first || i > s.last || (&s != &outer && !inside(s, outer)) || !replays(s)) continue;
    if (at(executed(s), i) || (s.kind == SpanKind::DiscardOutput && s.holds)) // a checkpoint object holds all arguments
      std::for_each(op(i).inputs.begin(), op(i).inputs.end(), add);
  }
  for (TensorId t : saved(i)) add(t);
  return out;
}

// `inner` is nested in `outer`; of two equal ranges the earlier in the list is the outer one.
bool Meaning::inside(const Span& inner, const Span& outer) const {
  if (inner.first < outer.first || inner.last > outer.last) return false;
  return inner.first != outer.first || inner.last != outer.last || &inner > &outer;
}

[[noreturn]] static void illegal(const std::string& what) { throw Error(ErrorCode::Config, what); }

void Meaning::check_spans() const {
  for (const Span& a : spans)
    for (const Span& b : spans)
      if (a.first < b.first && b.first <= a.last && a.last < b.last)
        illegal(fmt::format("'{}' and '{}' overlap in part", a.name, b.name));
  for (const Span& s : spans) {
    if (s.kind != SpanKind::DiscardOutput) continue;
    int end = op_count() - 1;
    for (const Span& outer : spans)
      if (&outer != &s && inside(s, outer)) end = std::min(end, outer.last);
    if (s.hook <= s.last || s.hook > end) illegal(fmt::format("the hook of '{}' is not behind it", s.name));
    for (TensorId t : outputs(s)) {
      TensorId owner = t;
      while (list.tensor(owner).base >= 0) owner = list.tensor(owner).base;
      if (int m = maker(owner); m < s.first || m > s.last) illegal(fmt::format("'{}' drops what it does not make", s.name));
    }
    if (list.output >= 0 && contains(outputs(s), list.output)) illegal(fmt::format("'{}' discards the output", s.name));
  }
}

std::vector<Node> Meaning::nest(int first, int last, const std::vector<int>& candidates) const {
  std::vector<Node> nodes;
  for (int i = first; i <= last;) {
    int outermost = -1;
    for (int c : candidates)
      if (at(spans, c).first == i && (outermost < 0 || inside(at(spans, outermost), at(spans, c)))) outermost = c;
    if (outermost < 0) {
      nodes.push_back({.op = i, .first = i, .last = i});
      ++i;
      continue;
    }
    const Span& s = at(spans, outermost);
    std::vector<int> inner;
    for (int c : candidates)
      if (c != outermost && inside(at(spans, c), s)) inner.push_back(c);
    nodes.push_back({.span = outermost, .first = i, .last = s.last, .children = nest(i, s.last, inner)});
    i = s.last + 1;
  }
  return nodes;
}

bool Meaning::requires_gradient(TensorId t) const {
  for (; t >= 0; t = list.tensor(t).base)
    if (at(required, t)) return true;
  return false;
}

// requires_grad of every tensor, in forward order.
void Meaning::mark_required() {
  required.assign(list.tensors.size(), false);
  if (list.input >= 0) at(required, list.input) = options.input_gradient;
  for (const Op& o : list.ops) {
    bool any = false;
    for (const ParamRef& p : o.params) any = any || p.trainable;
    for (TensorId t : o.inputs) any = any || (list.tensor(t).differentiable && requires_gradient(t));
    for (TensorId t : o.outputs) at(required, t) = any && list.tensor(t).differentiable;
  }
  for (size_t t = 0; t < required.size(); ++t) required[t] = requires_gradient(static_cast<TensorId>(t));
}

// Follows gradients from the end of the list: which steps run, on which gradients.
void Meaning::plan_backward() {
  step_runs.resize(list.ops.size());
  alias_runs.resize(list.ops.size());
  gradient_reads.resize(list.ops.size());
  gradient_writes.resize(list.ops.size());
  std::set<TensorId> arrived;
  if (list.output >= 0 && at(required, list.output)) arrived.insert(gradient_root(list.output));
  for (int i = op_count() - 1; i >= 0; --i) {
    for (const Step& s : op(i).steps) {
      std::vector<TensorId> reads, writes;
      for (TensorId t : s.grad_reads)
        if (arrived.count(gradient_root(t))) reads.push_back(t);
      for (TensorId t : s.grad_writes)
        if (at(required, t)) writes.push_back(t);
      bool wanted = !writes.empty();
      for (int p : s.param_grads) wanted = wanted || at(op(i).params, p).trainable;
      const bool run = options.backward && wanted && (s.grad_reads.empty() || !reads.empty());
      if (!run) reads.clear(), writes.clear();
      for (TensorId t : writes) arrived.insert(gradient_root(t));
      at(step_runs, i).push_back(run);
      at(gradient_reads, i).push_back(reads);
      at(gradient_writes, i).push_back(writes);
    }
    for (const Op::GradAlias& a : op(i).grad_aliases) {
      const bool run = options.backward && at(required, a.input) && arrived.count(gradient_root(a.output));
      if (run) arrived.insert(gradient_root(a.input));
      at(alias_runs, i).push_back(run);
    }
  }
}

} // namespace gdn::brute
