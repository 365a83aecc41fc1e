#include "model/library_buffers.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <tuple>

#include <fmt/core.h>

namespace gdn::model {

namespace {

// Weight shapes (rows, columns) of Transformer Engine's linear modules that train.
void add_shapes(const OpList& list, std::set<std::tuple<std::int64_t, std::int64_t, DType>>& shapes) {
  for (const Op& op : list.ops) {
    std::int64_t tensors = 1;
    if (op.kind == OpKind::GroupedLinear) tensors = std::get<MoeAttr>(op.attr).local_experts;
    else if (op.kind != OpKind::Linear || std::get<LinearAttr>(op.attr).mode == TensorParallel::None) continue; // the router's is torch's
    const ParamRef& weight = op.params[0];
    const std::int64_t columns = list.tensor(op.inputs[0]).cols();
    if (weight.trainable && tensors > 0) shapes.insert({weight.elements / tensors / columns, columns, weight.dtype});
  }
}

bool caches_dummies(const std::string& te_version) {
  int major = 0, minor = 0;
  if (std::sscanf(te_version.c_str(), "%d.%d", &major, &minor) < 2) return true;
  return major > 2 || (major == 2 && minor >= 4);
}

Bytes gathered_input(const OpList& list, const config::Run& run) {
  Bytes most = 0;
  for (const Op& op : list.ops) {
    const bool own = op.kind == OpKind::LmHead || (op.kind == OpKind::Linear && run.build == config::Build::Local);
    if (!own) continue;
    const LinearAttr& a = std::get<LinearAttr>(op.attr);
    if (a.mode == TensorParallel::Column && a.sequence_parallel && a.tp > 1)
      most = std::max(most, list.tensor(op.inputs[0]).bytes() * a.tp);
  }
  return most;
}

} // namespace

std::vector<LibraryBuffer> library_buffers(const std::vector<const OpList*>& lists, const config::Run& run) {
  std::vector<LibraryBuffer> out;
  if (run.stack != "megatron") return out;
  std::set<std::tuple<std::int64_t, std::int64_t, DType>> shapes;
  Bytes gathered = 0;
  for (const OpList* list : lists) {
    if (run.build == config::Build::Te && caches_dummies(run.settings.te_version)) add_shapes(*list, shapes);
    gathered = std::max(gathered, gathered_input(*list, run));
  }
  for (const auto& [rows, columns, dtype] : shapes)
    out.push_back({fmt::format("dummy weight gradient {} x {}", rows, columns),
                   "Transformer Engine 2.11, get_dummy_wgrad: one tensor a weight shape, cached", rows * columns * size_of(dtype)});
  if (gathered > 0)
    out.push_back({"gathered input of the output layer", "Megatron-LM main d98e8a64, GlobalMemoryBuffer \"mpu\"", gathered});
  return out;
}

} // namespace gdn::model
