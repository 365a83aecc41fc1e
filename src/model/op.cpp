#include "model/op.h"

#include <array>
#include <set>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::model {

std::string_view name_of(OpKind kind) {
  constexpr std::array kNames{
      "data", "view", "copy", "residual_add", "all_to_all", "all_gather", "reduce_scatter",
      "all_reduce", "rms_norm", "linear", "conv_silu", "conv", "silu", "l2norm", "expand_heads",
      "gates", "rule", "gdn2_gates", "gdn2_rule", "gated_norm", "gdn_pre", "head_norm", "rope",
      "core_attention", "output_gate", "router", "permute", "dispatch", "grouped_linear",
      "swiglu_prob", "combine_dispatch", "unpermute", "swiglu", "shared_gate", "embedding",
      "concat", "lm_head", "cross_entropy", "linear_cross_entropy", "loss_sum", "gdn2_pre",
      "attention_pre", "top_k", "router_loss", "sort", "gather", "shared_score", "toy"};
  static_assert(kNames.size() == static_cast<size_t>(OpKind::Toy) + 1);
  return kNames[static_cast<size_t>(kind)];
}

std::string_view name_of(CollectiveKind kind) {
  constexpr std::array kNames{"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view name_of(Group group) {
  constexpr std::array kNames{"tp", "cp", "ep", "etp", "dp", "edp", "pp"};
  return kNames[static_cast<size_t>(group)];
}

int OpList::find_op(std::string_view op_name) const {
  for (size_t i = 0; i < ops.size(); ++i)
    if (ops[i].name == op_name) return static_cast<int>(i);
  return -1;
}

TensorId OpList::find_tensor(std::string_view tensor_name) const {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].name == tensor_name) return static_cast<TensorId>(i);
  return -1;
}

int OpList::producer(TensorId id) const {
  for (TensorId t = id; t >= 0; t = tensor(t).base)
    for (size_t i = 0; i < ops.size(); ++i)
      for (TensorId o : ops[i].outputs)
        if (o == t) return static_cast<int>(i);
  return -1;
}

namespace {

class Verifier {
public:
  explicit Verifier(const OpList& list) : list_(list), produced_(list.tensors.size(), false) {}

  void run() {
    names();
    views();
    if (list_.input >= 0) produced_[static_cast<size_t>(list_.input)] = true;
    for (const Op& op : list_.ops) order(op);
    if (list_.output >= 0 && !available(list_.output)) fail("output", list_.output, "is never produced");
    for (const Hold& h : list_.holds)
      if (h.kind == HoldKind::Frame && (h.until < 0 || h.until >= static_cast<int>(list_.ops.size())))
        fail("holder", h.tensor, "ends at an op that does not exist");
  }

private:
  [[noreturn]] void fail(std::string_view op, TensorId t, std::string_view what) const {
    throw Error(ErrorCode::Internal,
                fmt::format("op list '{}', {}: tensor '{}' {}", list_.name, op,
                            t >= 0 ? list_.tensor(t).name : "?", what));
  }

  void names() const {
    std::set<std::string_view> seen;
    for (const Op& op : list_.ops)
      if (!seen.insert(op.name).second) fail(op.name, -1, "belongs to an op name used twice");
    seen.clear();
    for (size_t i = 0; i < list_.tensors.size(); ++i)
      if (!seen.insert(list_.tensors[i].name).second)
        fail("names", static_cast<TensorId>(i), "is named twice");
  }

  void views() const {
    for (size_t i = 0; i < list_.tensors.size(); ++i) {
      const Tensor& t = list_.tensors[i];
      std::int64_t end = t.offset + (t.rows() > 0 ? (t.rows() - 1) * t.row_stride + t.cols() : 0);
      if (t.storage < 0 || t.elements() < 0 || t.offset < 0 || t.row_stride < (t.rows() > 1 ? t.cols() : 0) ||
          (t.elements() > 0 && end * size_of(t.dtype) > list_.storages[static_cast<size_t>(t.storage)].bytes))
        fail("views", static_cast<TensorId>(i), "lies outside its storage");
      if (t.base >= 0 && list_.tensor(t.base).storage != t.storage)
        fail("views", static_cast<TensorId>(i), "is a view of a tensor in another storage");
    }
  }

  bool available(TensorId t) const {
    for (; t >= 0; t = list_.tensor(t).base)
      if (produced_[static_cast<size_t>(t)]) return true;
    return false;
  }

  void order(const Op& op) {
    for (TensorId t : op.inputs)
      if (!available(t)) fail(op.name, t, "is read before it is produced");
    for (TensorId t : op.outputs) produced_[static_cast<size_t>(t)] = true;
    std::set<TensorId> touched(op.inputs.begin(), op.inputs.end());
    touched.insert(op.outputs.begin(), op.outputs.end());
    std::set<TensorId> in(op.inputs.begin(), op.inputs.end());
    std::set<TensorId> out(op.outputs.begin(), op.outputs.end());
    for (const Step& s : op.steps) {
      for (TensorId t : s.reads) {
        if (!touched.count(t)) fail(op.name + "." + s.name, t, "is read by backward but is not touched by the op");
        if (t == list_.output) fail(op.name + "." + s.name, t, "is the unit's output and must not be read by its backward");
      }
      for (TensorId t : s.grad_reads)
        if (!out.count(t) && !in.count(t)) fail(op.name + "." + s.name, t, "has a gradient this op does not produce");
      for (TensorId t : s.grad_writes)
        if (!in.count(t)) fail(op.name + "." + s.name, t, "is not an input, so its gradient is not this op's");
      for (int p : s.param_grads)
        if (p < 0 || p >= static_cast<int>(op.params.size())) fail(op.name, -1, "names a parameter that is not there");
    }
  }

  const OpList& list_;
  std::vector<bool> produced_;
};

} // namespace

void verify(const OpList& list) { Verifier(list).run(); }

} // namespace gdn::model
