#include "plan/halves.h"

#include <algorithm>

namespace gdn::plan {

using model::Op;
using model::OpList;
using model::StorageId;
using model::TensorId;

namespace {

template <class AnyOp, class Visit> // Op or const Op
void each_tensor(AnyOp& op, Visit visit) {
  for (auto& t : op.inputs) visit(t);
  for (auto& t : op.outputs) visit(t);
  for (auto& s : op.steps)
    for (auto* ids : {&s.reads, &s.grad_reads, &s.grad_writes})
      for (auto& t : *ids) visit(t);
  for (auto& p : op.pins) visit(p.tensor);
  for (auto& a : op.grad_aliases) {
    visit(a.input);
    visit(a.output);
  }
}

struct Use {
  int first = -1, last = -1; // ops that touch a storage or hold it
  void at(int op) {
    if (first < 0 || op < first) first = op;
    last = std::max(last, op);
  }
};

std::vector<Use> uses(const OpList& list) {
  std::vector<Use> out(list.storages.size());
  auto of = [&](TensorId t) -> Use& { return out[static_cast<size_t>(list.tensor(t).storage)]; };
  if (list.input >= 0) of(list.input).at(0);
  const int n = static_cast<int>(list.ops.size());
  for (int i = 0; i < n; ++i) each_tensor(list.ops[static_cast<size_t>(i)], [&](TensorId t) { of(t).at(i); });
  for (const model::Hold& h : list.holds)
    if (h.kind == model::HoldKind::Frame) of(h.tensor).at(h.until);
    else if (h.kind == model::HoldKind::Caller) of(h.tensor).at(n - 1);
  return out;
}

// The one tensor that crosses into op `at`, in a storage of its own; -1: no cut there.
TensorId crossing(const OpList& list, const std::vector<Use>& uses, int at) {
  StorageId only = -1;
  for (size_t s = 0; s < uses.size(); ++s)
    if (uses[s].first >= 0 && uses[s].first < at && uses[s].last >= at) {
      if (only >= 0) return -1;
      only = static_cast<StorageId>(s);
    }
  TensorId found = -1;
  for (size_t t = 0; t < list.tensors.size() && only >= 0; ++t)
    if (list.tensors[t].storage == only) {
      if (found >= 0) return -1;
      found = static_cast<TensorId>(t);
    }
  const auto& made = list.ops[static_cast<size_t>(at - 1)].outputs;
  return std::find(made.begin(), made.end(), found) != made.end() ? found : -1;
}

OpList part(const OpList& list, int first, int last, TensorId input, TensorId output) {
  OpList out;
  out.name = list.name;
  out.tokens = list.tokens;
  std::vector<TensorId> tensor(list.tensors.size(), -1);
  std::vector<StorageId> storage(list.storages.size(), -1);
  auto map = [&](auto& self, TensorId id) -> TensorId {
    TensorId& mine = tensor[static_cast<size_t>(id)];
    if (mine >= 0) return mine;
    model::Tensor copy = list.tensor(id);
    if (copy.base >= 0) copy.base = self(self, copy.base);
    StorageId& s = storage[static_cast<size_t>(copy.storage)];
    if (s < 0) {
      s = static_cast<StorageId>(out.storages.size());
      out.storages.push_back(list.storages[static_cast<size_t>(copy.storage)]);
    }
    copy.storage = s;
    mine = static_cast<TensorId>(out.tensors.size());
    out.tensors.push_back(std::move(copy));
    return mine;
  };
  // In the list's own order: a storage's first tensor names it.
  std::vector<bool> used(list.tensors.size());
  auto mark = [&](auto& self, TensorId id) -> void {
    used[static_cast<size_t>(id)] = true;
    if (list.tensor(id).base >= 0) self(self, list.tensor(id).base);
  };
  if (input >= 0) mark(mark, input);
  for (int i = first; i <= last; ++i) each_tensor(list.ops[static_cast<size_t>(i)], [&](TensorId t) { mark(mark, t); });
  for (size_t t = 0; t < used.size(); ++t)
    if (used[t]) map(map, static_cast<TensorId>(t));
  for (int i = first; i <= last; ++i) {
    Op op = list.ops[static_cast<size_t>(i)];
    each_tensor(op, [&](TensorId& t) { t = tensor[static_cast<size_t>(t)]; });
    out.ops.push_back(std::move(op));
  }
  for (model::Hold h : list.holds)
    if (const int made = list.producer(h.tensor); made >= first && made <= last) {
      h.tensor = tensor[static_cast<size_t>(h.tensor)];
      if (h.until >= 0) h.until -= first;
      out.holds.push_back(h);
    }
  out.input = input >= 0 ? tensor[static_cast<size_t>(input)] : -1;
  out.output = output >= 0 ? tensor[static_cast<size_t>(output)] : -1;
  return out;
}

} // namespace

std::vector<OpList> halves(const OpList& list) {
  const std::vector<Use> used = uses(list);
  std::vector<OpList> out;
  int first = 0;
  TensorId input = list.input;
  const int n = static_cast<int>(list.ops.size());
  if (list.output < 0) return {list}; // an end of the model
  for (int at = 1; at < n; ++at) {
    const TensorId t = crossing(list, used, at);
    if (t < 0) continue;
    out.push_back(part(list, first, at - 1, input, t));
    first = at;
    input = t;
  }
  out.push_back(part(list, first, n - 1, input, list.output));
  return out;
}

} // namespace gdn::plan
