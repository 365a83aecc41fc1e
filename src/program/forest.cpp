#include "program/forest.h"

#include <algorithm>
#include <numeric>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::program {

using model::OpList;
using model::TensorId;

namespace {

bool inside(int op, const Span& s) { return op >= s.first && op <= s.last; }

void add_once(std::vector<TensorId>& set, TensorId t) {
  if (std::find(set.begin(), set.end(), t) == set.end()) set.push_back(t);
}

} // namespace

std::vector<int> producers(const OpList& list) {
  std::vector<int> made(list.tensors.size(), -1);
  for (size_t i = 0; i < list.ops.size(); ++i)
    for (TensorId t : list.ops[i].outputs) made[static_cast<size_t>(t)] = static_cast<int>(i);
  for (size_t t = 0; t < made.size(); ++t)
    for (TensorId base = list.tensors[t].base; made[t] < 0 && base >= 0; base = list.tensor(base).base)
      made[t] = made[static_cast<size_t>(base)];
  return made;
}

std::vector<TensorId> span_outputs(const OpList& list, const Span& span) {
  std::vector<int> made = producers(list);
  std::vector<TensorId> outputs;
  for (size_t i = static_cast<size_t>(span.last) + 1; i < list.ops.size(); ++i)
    for (TensorId t : list.ops[i].inputs)
      if (inside(made[static_cast<size_t>(t)], span)) add_once(outputs, t);
  if (list.output >= 0 && inside(made[static_cast<size_t>(list.output)], span)) add_once(outputs, list.output);
  return outputs;
}

std::vector<TensorId> span_arguments(const OpList& list, const Span& span) {
  std::vector<int> made = producers(list);
  std::vector<TensorId> arguments;
  for (int i = span.first; i <= span.last; ++i)
    for (TensorId t : list.ops[static_cast<size_t>(i)].inputs)
      if (!inside(made[static_cast<size_t>(t)], span)) add_once(arguments, t);
  return arguments;
}

namespace {

class ForestBuilder {
public:
  ForestBuilder(const OpList& list, const std::vector<Span>& spans) : list_(list), spans_(spans), made_(producers(list)) {}

  std::vector<Node> run() {
    std::vector<int> order(spans_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      const Span &x = spans_[static_cast<size_t>(a)], &y = spans_[static_cast<size_t>(b)];
      return x.first != y.first ? x.first < y.first : x.last > y.last;
    });
    for (const Span& s : spans_)
      if (s.first < 0 || s.last < s.first || s.last >= static_cast<int>(list_.ops.size()))
        throw Error(ErrorCode::Internal, fmt::format("span '{}' lies outside op list '{}'", s.name, list_.name));
    at_ = order.begin();
    end_ = order.end();
    return level(0, static_cast<int>(list_.ops.size()) - 1, nullptr);
  }

private:
  std::vector<Node> level(int first, int last, const Span* parent) {
    std::vector<Node> nodes;
    int op = first;
    while (op <= last) {
      if (at_ == end_ || spans_[static_cast<size_t>(*at_)].first != op) {
        nodes.push_back({.op = op, .first = op, .last = op});
        ++op;
        continue;
      }
      int index = *at_++;
      const Span& s = spans_[static_cast<size_t>(index)];
      if (s.last > last)
        throw Error(ErrorCode::Config,
                    fmt::format("spans '{}' and '{}' overlap without nesting: '{}' ends at op '{}' inside '{}'",
                                parent->name, s.name, parent->name, name(last), s.name),
                    "nest one inside the other, or separate them");
      check_hook(s, last, parent);
      nodes.push_back({.span = index, .first = op, .last = s.last, .children = level(op, s.last, &s)});
      op = s.last + 1;
    }
    return nodes;
  }

  void check_hook(const Span& s, int last, const Span* parent) const {
    if (s.kind != SpanKind::DiscardOutput) return;
    if (s.hook <= s.last || s.hook > last)
      throw Error(ErrorCode::Config,
                  fmt::format("discard span '{}' ({}..{}) hooks on op '{}', which does not follow it{}", s.name,
                              name(s.first), name(s.last), s.hook >= 0 ? name(s.hook) : "none",
                              parent ? fmt::format(" inside '{}'", parent->name) : ""),
                  "a discard span needs a later op of the same enclosing span that consumes its outputs");
    for (TensorId t : span_outputs(list_, s)) {
      if (t == list_.output)
        throw Error(ErrorCode::Config, fmt::format("discard span '{}' makes the output of '{}', which must stay",
                                                   s.name, list_.name));
      TensorId owner = t;
      while (list_.tensor(owner).base >= 0) owner = list_.tensor(owner).base;
      if (!inside(made_[static_cast<size_t>(owner)], s))
        throw Error(ErrorCode::Config,
                    fmt::format("discard span '{}' would drop '{}' of '{}', which it does not make: its output '{}' is a view of it",
                                s.name, list_.tensor(owner).name, list_.name, list_.tensor(t).name),
                    "start the span where that tensor is made, or make it a whole-block span");
    }
  }

  const std::string& name(int op) const { return list_.ops[static_cast<size_t>(op)].name; }

  const OpList& list_;
  const std::vector<Span>& spans_;
  std::vector<int> made_; // op index that made each tensor
  std::vector<int>::iterator at_, end_;
};

} // namespace

std::vector<Node> build_forest(const OpList& list, const std::vector<Span>& spans) {
  return ForestBuilder(list, spans).run();
}

} // namespace gdn::program
