#include "model/fp8.h"

#include <algorithm>

#include "model/static_state.h"

namespace gdn::model {

namespace {

bool quantised(const Op& op) {
  if (op.kind == OpKind::GroupedLinear) return true;
  return op.kind == OpKind::Linear && std::get<LinearAttr>(op.attr).mode != TensorParallel::None;
}

bool keeps_original(const Op& op, const config::Run& run) {
  const auto& modules = run.recompute.modules;
  return op.name == "expert_fc2" && modules && std::find(modules->begin(), modules->end(), "moe_act") != modules->end();
}

} // namespace

bool low_precision(const config::Run& run) { return run.stack == "megatron" && (!run.fp8_recipe.empty() || run.fp4); }

Bytes quantised_bytes(const config::Run& run, std::int64_t elements) {
  if (run.fp4) return elements / 2 + elements / 16;
  if (run.fp8_recipe == "mxfp8") return elements + elements / 32;
  if (run.fp8_recipe == "blockwise") return elements + elements / 128 * 4;
  return elements + 4;
}

namespace {

// A bf16 value is read (twice where the scale of the whole tensor is found first) and written for the forward's
// layout and for the weight gradient's.
LowPrecision precision_of(const config::Run& run) {
  const int bits = run.fp4 ? 4 : 8;
  return {bits, (run.fp8_recipe == "tensorwise" && !run.fp4 ? 4 : 2) + 2 * bits / 8.0};
}

} // namespace

void quantise_inputs(OpList& list, const config::Run& run) {
  if (!low_precision(run)) return;
  for (Op& op : list.ops) {
    if (!quantised(op)) continue;
    op.low = precision_of(run);
    if (keeps_original(op, run)) continue;
    const TensorId x = op.inputs[0];
    for (Step& step : op.steps)
      for (TensorId& read : step.reads) {
        if (read != x) continue;
        const Bytes bytes = quantised_bytes(run, list.tensor(x).elements());
        Tensor t;
        t.name = op.name + ".input_low";
        t.dtype = DType::FP8;
        t.shape = {bytes};
        t.row_stride = 1;
        t.storage = static_cast<StorageId>(list.storages.size());
        t.differentiable = false;
        list.storages.push_back({t.name, bytes, Category::Activations, false});
        list.tensors.push_back(std::move(t));
        read = static_cast<TensorId>(list.tensors.size()) - 1;
        op.outputs.push_back(read);
      }
  }
  verify(list);
}

Bytes quantised_weights(const ParameterTable& table, const config::Model& model, const config::Run& run,
                        std::int64_t pipeline_rank, int sm) {
  if (!low_precision(run)) return 0;
  const bool per_tensor = !run.fp4 && (run.fp8_recipe == "tensorwise" || run.fp8_recipe == "delayed");
  const int copies = per_tensor && sm >= 100 ? 1 : 2;
  Bytes bytes = 0;
  for (const LocalParameter& p : local_parameters(table, model, run, pipeline_rank))
    if (quantised_when_frozen(*p.parameter)) bytes += copies * quantised_bytes(run, p.elements);
  return bytes;
}

// Transformer Engine's checks: rows by 8 and columns by 16 for per-tensor and blockwise fp8, both by 32 for mxfp8,
// both by 16 for nvfp4.
std::vector<Misaligned> misaligned(const OpList& list, const config::Run& run) {
  std::vector<Misaligned> found;
  if (!low_precision(run)) return found;
  const std::int64_t rows = run.fp4 ? 16 : run.fp8_recipe == "mxfp8" ? 32 : 8, columns = run.fp8_recipe == "mxfp8" && !run.fp4 ? 32 : 16;
  for (const Op& op : list.ops) {
    if (!quantised(op)) continue;
    const Tensor &x = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
    auto require = [&](const char* what, std::int64_t size, std::int64_t multiple) {
      if (size % multiple != 0) found.push_back({op.name, what, size, multiple});
    };
    if (op.kind == OpKind::Linear) require("rows of the input", x.rows(), rows);
    require("columns of the input", x.cols(), columns);
    require("columns of the output", y.cols(), columns);
  }
  return found;
}

} // namespace gdn::model
