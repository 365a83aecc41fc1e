#include <algorithm>
#include <utility>

#include "model/kinds/definitions.h"
#include "trainer/cpu/ops.h"
#include "trainer/cpu/wide.h"

// Fused kinds by their definition: the plain ops it lists run one after the other, their tensors in
// scratch. Backward makes again what the plain backward steps read, then runs those.
namespace gdn::trainer::cpu {

using model::Definition;
using model::Op;
using model::OpList;
using model::TensorId;

namespace {

constexpr Bytes kInnerAlignment = 256;

size_t index(int i) { return static_cast<size_t>(i); }

size_t root_of(const OpList& list, TensorId t) { // owner of d:t
  while (list.tensor(t).base >= 0 && list.tensor(t).gradient == model::GradientStorage::Slice) t = list.tensor(t).base;
  return index(t);
}

// The definition in the precision of the op: its inner tensors are wide where its operands are.
Definition definition_of(const OpList& list, const Op& op) {
  Definition d = model::definition(list, op);
  if (list.tensor(op.inputs[0]).dtype == DType::FP64) d.list = widened(std::move(d.list));
  return d;
}

// Where everything of one run lies in its scratch, by storage and by gradient root; -1: not there.
struct Places {
  std::vector<Bytes> storage, gradient;
  Bytes inner = 0, total = 0; // start of the scratch of single ops; bytes

  Places(const Definition& d, int step) : storage(d.list.storages.size(), -1), gradient(d.list.tensors.size(), -1) {
    auto place = [&](Bytes& at, Bytes bytes) {
      if (at >= 0) return;
      at = total;
      total += round_up(bytes, kInnerAlignment);
    };
    std::vector<char> bound(storage.size(), 0); // in the caller's memory
    for (TensorId t : d.inputs) bound[index(d.list.tensor(t).storage)] = 1;
    if (step < 0)
      for (TensorId t : d.outputs) bound[index(d.list.tensor(t).storage)] = 1;
    for (size_t s = 0; s < storage.size(); ++s)
      if (!bound[s]) place(storage[s], d.list.storages[s].bytes);
    if (step >= 0)
      for (const Op& op : d.list.ops)
        for (TensorId t : op.outputs) {
          const size_t r = root_of(d.list, t);
          const bool outside = std::find(d.inputs.begin(), d.inputs.end(), static_cast<TensorId>(r)) != d.inputs.end() ||
                               std::find(d.outputs.begin(), d.outputs.end(), static_cast<TensorId>(r)) != d.outputs.end();
          if (!outside && d.list.tensors[r].differentiable) place(gradient[r], d.list.tensors[r].bytes());
        }
    inner = total;
    Bytes most = 0;
    for (const Op& op : d.list.ops)
      if (auto scratch = functions_of(op.kind).scratch)
        for (int s = -1; s < static_cast<int>(op.steps.size()); ++s) most = std::max(most, scratch(d.list, op, s));
    total += most;
  }
};

Bytes fused_scratch(const OpList& list, const Op& op, int step) { return Places(definition_of(list, op), step).total; }

class Interpreter {
public:
  explicit Interpreter(const OpCall& c)
      : c_(c), d_(definition_of(c.list(), c.op())), places_(d_, c.step()), scratch_(c.scratch(places_.total)),
        memory_(d_.list.tensors.size()), gradient_(d_.list.tensors.size()), written_(d_.list.tensors.size(), 0) {
    const std::vector<char> needed = needed_again();
    for (size_t i = 0; i < d_.inputs.size(); ++i)
      if (c.step() < 0 || is_read(d_.inputs[i], needed)) bind(d_.inputs[i], c.in(i));
  }

  void forward() {
    for (size_t i = 0; i < d_.outputs.size(); ++i) bind(d_.outputs[i], c_.out(i));
    for (size_t i = 1; i < d_.list.ops.size(); ++i) run(d_.list.ops[i], static_cast<int>(i), -1);
  }

  void backward() {
    for (size_t i = 0; i < d_.outputs.size(); ++i)
      if (View d = c_.d_out_if_any(i)) {
        gradient_[index(d_.outputs[i])] = d;
        written_[index(d_.outputs[i])] = 1;
      }
    for (size_t i = 0; i < d_.inputs.size(); ++i)
      if (GradView d = c_.d_in(i)) {
        gradient_[index(d_.inputs[i])] = d.to;
        written_[index(d_.inputs[i])] = d.accumulate;
      }
    const std::vector<char> needed = needed_again();
    for (size_t i = 1; i < d_.list.ops.size(); ++i)
      if (needed[i]) run(d_.list.ops[i], static_cast<int>(i), -1);
    for (size_t i = d_.list.ops.size(); i-- > 1;)
      for (size_t s = 0; s < d_.list.ops[i].steps.size(); ++s) run(d_.list.ops[i], static_cast<int>(i), static_cast<int>(s));
  }

private:
  // Whether a backward step, or an op that runs again for one, reads t.
  bool is_read(TensorId t, const std::vector<char>& needed) const {
    auto has = [&](const std::vector<TensorId>& ids) { return std::find(ids.begin(), ids.end(), t) != ids.end(); };
    for (size_t i = 1; i < d_.list.ops.size(); ++i) {
      const Op& op = d_.list.ops[i];
      if (needed[i] && has(op.inputs)) return true;
      if (std::any_of(op.steps.begin(), op.steps.end(), [&](const model::Step& s) { return has(s.reads); })) return true;
    }
    return false;
  }
  void bind(TensorId t, const View& v) { memory_[index(t)] = v; }

  // Ops whose outputs a backward step reads, and what those need.
  std::vector<char> needed_again() const {
    std::vector<char> op_needed(d_.list.ops.size(), 0), storage(d_.list.storages.size(), 0);
    auto want = [&](TensorId t) { storage[index(d_.list.tensor(t).storage)] = 1; };
    for (const Op& op : d_.list.ops)
      for (const model::Step& s : op.steps) std::for_each(s.reads.begin(), s.reads.end(), want);
    for (size_t i = d_.list.ops.size(); i-- > 1;) {
      const Op& op = d_.list.ops[i];
      op_needed[i] = std::any_of(op.outputs.begin(), op.outputs.end(),
                                 [&](TensorId t) { return storage[index(d_.list.tensor(t).storage)]; });
      if (op_needed[i]) std::for_each(op.inputs.begin(), op.inputs.end(), want);
    }
    return op_needed;
  }

  // A forward tensor: in the caller's memory, or in scratch.
  OpCall::Operand operand(TensorId t, program::AccessMode mode) const {
    OpCall::Operand o{{-1, t, mode, false}, nullptr, t, {}};
    if (memory_[index(t)]) o.placed = memory_[index(t)];
    else o.buffer = scratch_.data() + places_.storage[index(d_.list.tensor(t).storage)];
    return o;
  }
  OpCall::Operand gradient(TensorId t, program::AccessMode mode) const {
    const size_t r = root_of(d_.list, t);
    OpCall::Operand o{{-1, t, mode, true}, nullptr, static_cast<TensorId>(r), {}};
    if (places_.gradient[r] >= 0) o.buffer = scratch_.data() + places_.gradient[r];
    else o.placed = gradient_[r];
    return o;
  }
  bool has_gradient(TensorId t) const { return written_[root_of(d_.list, t)] || written_[index(t)]; }
  bool wants_gradient(TensorId t) const {
    const size_t r = root_of(d_.list, t);
    return places_.gradient[r] >= 0 || gradient_[r];
  }

  // Parameters of the fused op, by name.
  std::vector<OpCall::Parameter> parameters(const Op& op, int step) const {
    std::vector<OpCall::Parameter> out;
    for (size_t i = 0; i < op.params.size(); ++i) {
      const auto& mine = c_.op().params;
      const auto at = std::find_if(mine.begin(), mine.end(), [&](const auto& p) { return p.name == op.params[i].name; });
      const auto n = static_cast<size_t>(at - mine.begin());
      OpCall::Parameter p{c_.param(n, 1, mine[n].elements), {}};
      if (step >= 0)
        for (int g : op.steps[index(step)].param_grads)
          if (g == static_cast<int>(i)) p.gradient = c_.param_grad(n, 1, mine[n].elements);
      out.push_back(p);
    }
    return out;
  }

  void run(const Op& op, int op_index, int step) {
    using program::AccessMode;
    std::vector<OpCall::Operand> operands;
    if (step < 0) {
      for (TensorId t : op.inputs) operands.push_back(operand(t, AccessMode::Read));
      for (TensorId t : op.outputs) operands.push_back(operand(t, AccessMode::Write));
    } else {
      const model::Step& s = op.steps[index(step)];
      if (std::none_of(s.grad_reads.begin(), s.grad_reads.end(), [&](TensorId t) { return has_gradient(t); })) return;
      for (TensorId t : s.reads) operands.push_back(operand(t, AccessMode::Read));
      for (TensorId t : s.grad_reads)
        if (has_gradient(t)) operands.push_back(gradient(t, AccessMode::Read));
      for (TensorId t : s.grad_writes)
        if (wants_gradient(t)) operands.push_back(gradient(t, std::exchange(written_[index(t)], 1) ? AccessMode::Accumulate : AccessMode::Write));
      for (TensorId t : s.grad_writes) written_[root_of(d_.list, t)] = 1;
    }
    program::Event event;
    event.op = op_index;
    event.step = step;
    event.pass = c_.pass();
    OpCall call(d_.list, event, std::move(operands), parameters(op, step), scratch_.subspan(static_cast<size_t>(places_.inner)),
                c_.context(), c_.micro_batch(), tables_);
    const OpFunctions& f = functions_of(op.kind);
    (step < 0 ? f.forward : f.backward)(call);
    call.check_all_used();
  }

  const OpCall& c_;
  const Definition d_;
  const Places places_;
  std::span<std::byte> scratch_;
  std::vector<View> memory_, gradient_; // the caller's, by tensor
  std::vector<char> written_;           // d:t has a value
  HostTables tables_;
};

void fused_forward(const OpCall& c) { Interpreter(c).forward(); }
void fused_backward(const OpCall& c) { Interpreter(c).backward(); }

} // namespace

std::span<const Entry> fused_ops() {
  static const Entry ops[] = {
      {model::OpKind::GdnPre, {fused_forward, fused_backward, fused_scratch}},
      {model::OpKind::Gdn2Pre, {fused_forward, fused_backward, fused_scratch}},
      {model::OpKind::AttentionPre, {fused_forward, fused_backward, fused_scratch}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
