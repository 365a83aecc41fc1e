#include "model/concat.h"

#include <fmt/core.h>

namespace gdn::model {

OpList concat(const std::vector<const OpList*>& units) {
  OpList out;
  for (size_t u = 0; u < units.size(); ++u) {
    const OpList& unit = *units[u];
    const std::string prefix = fmt::format("L{}.", u);
    const int first_op = static_cast<int>(out.ops.size());
    std::vector<TensorId> tensor(unit.tensors.size());
    std::vector<StorageId> storage(unit.storages.size(), -1);
    if (u > 0) { // the residual stream is one tensor
      tensor[static_cast<size_t>(unit.input)] = out.output;
      storage[static_cast<size_t>(unit.tensor(unit.input).storage)] = out.tensor(out.output).storage;
    }
    for (size_t s = 0; s < unit.storages.size(); ++s) {
      if (storage[s] >= 0) continue;
      storage[s] = static_cast<StorageId>(out.storages.size());
      out.storages.push_back(unit.storages[s]);
      out.storages.back().name = prefix + unit.storages[s].name;
    }
    for (size_t t = 0; t < unit.tensors.size(); ++t) {
      if (u > 0 && static_cast<TensorId>(t) == unit.input) continue;
      Tensor copy = unit.tensors[t];
      copy.name = prefix + copy.name;
      copy.storage = storage[static_cast<size_t>(copy.storage)];
      if (copy.base >= 0) copy.base = tensor[static_cast<size_t>(copy.base)];
      tensor[t] = static_cast<TensorId>(out.tensors.size());
      out.tensors.push_back(std::move(copy));
    }
    auto map = [&](std::vector<TensorId>& ids) {
      for (TensorId& id : ids) id = tensor[static_cast<size_t>(id)];
    };
    for (Op op : unit.ops) {
      op.name = prefix + op.name;
      map(op.inputs);
      map(op.outputs);
      for (Step& s : op.steps) {
        map(s.reads);
        map(s.grad_reads);
        map(s.grad_writes);
      }
      for (Pin& p : op.pins) p.tensor = tensor[static_cast<size_t>(p.tensor)];
      for (Op::GradAlias& a : op.grad_aliases)
        a = {tensor[static_cast<size_t>(a.input)], tensor[static_cast<size_t>(a.output)]};
      for (ParamRef& p : op.params) p.name = prefix + p.name;
      out.ops.push_back(std::move(op));
    }
    for (Hold h : unit.holds) {
      h.tensor = tensor[static_cast<size_t>(h.tensor)];
      if (h.until >= 0) h.until += first_op;
      out.holds.push_back(h);
    }
    if (u == 0 && unit.input >= 0) out.input = tensor[static_cast<size_t>(unit.input)];
    out.output = unit.output >= 0 ? tensor[static_cast<size_t>(unit.output)] : -1;
    out.name += (u ? " + " : "") + unit.name;
    out.tokens = unit.tokens;
  }
  return out;
}

} // namespace gdn::model
