#include "plan/trace_templates.h"

#include <string_view>

namespace gdn::plan {

using model::OpList;
using model::TensorId;

RememberedWork::RememberedWork(const model::Provider& provider, const OpList& list)
    : provider_(provider), list_(list), known_(list.ops.size()) {}

model::Work RememberedWork::work(const OpList& list, const model::Op& op, int step) const {
  if (&list != &list_) return provider_.work(list, op, step);
  std::vector<Known>& of_op = known_[static_cast<size_t>(&op - list.ops.data())];
  if (of_op.empty()) of_op.resize(op.steps.size() + 1);
  Known& k = of_op[static_cast<size_t>(step + 1)];
  if (!k.known) k = {true, provider_.work(list, op, step)};
  return k.work;
}

namespace {

// Everything of a list that program::trace and model::spans_for read, sizes apart, as one string.
class Structure {
public:
  explicit Structure(const OpList& list) {
    number(list.input);
    number(list.output);
    for (const model::Storage& s : list.storages) number(static_cast<int>(s.category) * 2 + s.external);
    for (const model::Tensor& t : list.tensors) {
      number(t.storage);
      number(t.base);
      number(static_cast<int>(t.gradient) * 2 + t.differentiable);
    }
    for (const model::Op& o : list.ops) {
      text(o.name);
      number(static_cast<int>(o.kind) * 2 + o.effects);
      ids(o.inputs);
      ids(o.outputs);
      for (const model::ParamRef& p : o.params) number(p.trainable);
      for (const model::Step& s : o.steps) {
        text(s.name);
        ids(s.reads);
        ids(s.grad_reads);
        ids(s.grad_writes);
        ids(s.param_grads);
      }
      for (const model::Pin& p : o.pins) number(p.tensor);
      number(-2);
      for (const model::Op::GradAlias& a : o.grad_aliases) {
        number(a.input);
        number(a.output);
      }
    }
    for (const model::Hold& h : list.holds) {
      number(h.tensor);
      number(static_cast<int>(h.kind));
      number(h.until);
    }
  }

  std::string take() { return std::move(out_); }

private:
  void number(int n) { out_.append({static_cast<char>(n), static_cast<char>(n >> 8), static_cast<char>(n >> 16)}); }
  void ids(const std::vector<int>& list) {
    number(static_cast<int>(list.size()));
    for (int id : list) number(id);
  }
  void text(std::string_view t) { (out_ += t) += '\0'; }

  std::string out_;
};

} // namespace

TraceTemplates::Traces& TraceTemplates::of(const OpList& list, bool input_gradient) {
  return known_[Structure(list).take() + (input_gradient ? "+" : "-")];
}

} // namespace gdn::plan
