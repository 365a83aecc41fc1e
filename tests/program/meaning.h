#pragma once
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "model/op.h"
#include "model/span.h"
#include "program/trace.h"

namespace gdn::brute {

template <class T, class I> decltype(auto) at(T& v, I i) { return v[static_cast<size_t>(i)]; }
template <class T, class V> bool contains(const T& v, V x) {
  return std::find(v.begin(), v.end(), x) != v.end();
}

// A node of a list under its spans: an op, or a span with the nodes inside it.
struct Node {
  int op = -1, span = -1, first = 0, last = 0;
  std::vector<Node> children = {};
};

// What a list under spans means before anything runs: which steps run, what each op's backward
// keeps, what a span takes, gives and replays. Read off the contract by walking the list.
class Meaning {
public:
  // Throws Error{Config} for illegal spans.
  Meaning(const model::OpList& list, const std::vector<model::Span>& spans, const program::TraceOptions& options);

  int op_count() const { return static_cast<int>(list.ops.size()); }
  const model::Op& op(int i) const { return at(list.ops, i); }
  model::StorageId storage(model::TensorId t) const { return list.tensor(t).storage; }

  // The listed tensor that `t` is another name of, and the op that makes it; -1: none.
  model::TensorId listed(model::TensorId t) const { return at(listed_, t); }
  int maker(model::TensorId t) const { return at(makers_, t); }
  // The tensor whose gradient buffer holds d:t.
  model::TensorId gradient_root(model::TensorId t) const;

  // Whether any backward step of the op runs.
  bool runs(int op_index) const { return contains(at(step_runs, op_index), true); }
  // Forward tensors that a step refers to; a gradient written over a forward tensor refers to it.
  std::vector<model::TensorId> read_by(const model::Step& s) const;
  // Tensors kept for the backward of an op: what its running steps refer to, and pins.
  std::vector<model::TensorId> saved(int op_index) const;

  // Made inside the span and read outside.
  const std::vector<model::TensorId>& outputs(const model::Span& s) const { return at(outputs_, index(s)); }
  // A span that no gradient passes, and whose outputs nobody wants again, is never replayed.
  bool replays(const model::Span& s) const { return at(replays_, index(s)); }
  // The ops that a replay of the span runs.
  const std::vector<char>& executed(const model::Span& s) const { return at(executed_, index(s)); }

  // Storages that the code of op `i` refers to in a run.
  std::set<model::StorageId> touched(int i, const std::vector<char>& executes) const;
  // Storages made before a span that the replays and the backward of its op `i` refer to.
  std::set<model::StorageId> wanted_again(int i, const model::Span& outer) const;

  const model::OpList& list;
  const std::vector<model::Span>& spans;
  const program::TraceOptions& options;
  std::vector<Node> forest;
  std::vector<bool> required;                // per tensor: carries a gradient
  std::vector<std::vector<bool>> step_runs;  // per op and step
  std::vector<std::vector<bool>> alias_runs; // per op and alias
  // Gradients that each running step reads; those it writes.
  std::vector<std::vector<std::vector<model::TensorId>>> gradient_reads, gradient_writes;

private:
  size_t index(const model::Span& s) const { return static_cast<size_t>(&s - spans.data()); }
  bool inside(const model::Span& inner, const model::Span& outer) const;
  bool saved_outside(const model::Span& s, model::TensorId t) const;
  // Or read by the replay of a later span.
  bool wanted_outside(const model::Span& s, model::TensorId t) const;
  bool requires_gradient(model::TensorId t) const;

  void name_makers();
  void check_spans() const;
  std::vector<Node> nest(int first, int last, const std::vector<int>& candidates) const;
  void mark_required();
  void plan_backward();
  std::vector<model::TensorId> find_outputs(const model::Span& s) const;
  bool find_replays(const model::Span& s) const;
  std::vector<char> find_executed(const model::Span& s) const;

  std::vector<model::TensorId> listed_;
  std::vector<int> makers_;
  std::vector<std::vector<model::TensorId>> outputs_; // per span, as the next two
  std::vector<bool> replays_;
  std::vector<std::vector<char>> executed_;
};

} // namespace gdn::brute
