#include "trainer/cpu/wide.h"

#include <algorithm>

#include "trainer/cpu/ops.h"

namespace gdn::trainer::cpu {

namespace {

bool floating(DType d) { return d == DType::BF16 || d == DType::FP16 || d == DType::FP32; }
DType wide(DType d) { return floating(d) ? DType::FP64 : d; }

} // namespace

model::OpList widened(model::OpList list) {
  for (const model::Tensor& t : list.tensors)
    if (floating(t.dtype)) {
      Bytes& bytes = list.storages[static_cast<size_t>(t.storage)].bytes;
      const std::int64_t last = t.offset + (t.rows() - 1) * t.row_stride + t.cols();
      bytes = std::max(bytes, last * size_of(DType::FP64));
    }
  for (model::Tensor& t : list.tensors) t.dtype = wide(t.dtype);
  for (model::Op& op : list.ops)
    for (model::ParamRef& p : op.params) p.dtype = wide(p.dtype);
  return list;
}

namespace {

void run_with(const OpFunctions& f, const OpCall& call, const model::OpList& list, const Placement& place) {
  const bool is_wide = &list != &call.list();
  auto dtype = [&](DType d) { return is_wide ? wide(d) : d; };
  auto placed = [&](View v) {
    if (!v) return v;
    v.data = place(v.data, v.dtype);
    v.dtype = dtype(v.dtype);
    return v;
  };
  std::vector<OpCall::Operand> operands = call.operands();
  for (OpCall::Operand& o : operands) o.buffer = place(o.buffer, call.list().tensor(o.access.tensor).dtype);
  std::vector<OpCall::Parameter> parameters;
  for (size_t i = 0; i < call.op().params.size(); ++i) {
    const std::int64_t n = call.op().params[i].elements;
    OpCall::Parameter p{placed(call.param(i, 1, n)), {}};
    if (call.step() >= 0) {
      const auto& written = call.backward_step().param_grads;
      if (std::find(written.begin(), written.end(), static_cast<int>(i)) != written.end()) p.gradient = placed(call.param_grad(i, 1, n));
    }
    parameters.push_back(p);
  }
  program::Event event;
  event.op = call.op_index();
  event.step = call.step();
  event.pass = call.pass();
  StepContext context = call.context();
  context.totals = nullptr;
  HostTables tables; // rows of experts that earlier ops of this unit have left
  for (size_t i = 0; i < list.ops.size(); ++i)
    if (list.ops[i].kind == model::OpKind::Permute || list.ops[i].kind == model::OpKind::Router) tables[static_cast<int>(i)] = call.host_table(static_cast<int>(i));
  std::vector<std::byte> scratch(f.scratch ? static_cast<size_t>(f.scratch(list, list.ops[static_cast<size_t>(event.op)], event.step)) : 0);
  const OpCall elsewhere(list, event, std::move(operands), std::move(parameters), scratch, context, call.micro_batch(), tables);
  (event.step < 0 ? f.forward : f.backward)(elsewhere);
}

} // namespace

void run_elsewhere(const OpCall& call, const model::OpList& list, const Placement& place) {
  run_with(functions_of(call.op().kind), call, list, place);
}

void run_rounded_rule(const OpCall& call, const model::OpList& wide, const Placement& place) {
  run_with(rounded_rule(), call, wide, place);
}

} // namespace gdn::trainer::cpu
