#include "model/upstream.h"

namespace gdn::model::upstream {

// Separate PyTorch ops over [T, E]: top-k, softmax, two scatters into zeros, the map through int32,
// and the scores of the auxiliary loss again.
Work router(const OpList& list, const Op& op, int step) {
  const MoeAttr& a = std::get<MoeAttr>(op.attr);
  const Bytes dense = list.tensor(op.inputs[0]).rows() * a.experts * 4;
  return memory_bound(list, op, step, Family::Router, dense, (is_forward(step) ? 9 : 5) + (a.aux_coeff > 0 ? 6 : 0), 2.5);
}

// Fused: Transformer Engine's row-map kernels. Unfused: an argsort over [E, T] in int64, and
// contiguous transposed copies of map and probabilities.
Work permute(const OpList& list, const Op& op, int step) {
  const bool fused = list.tensor(op.outputs[2]).dtype == DType::Int32;
  const Tensor& probs = list.tensor(op.inputs[1]);
  if (fused) return memory_bound(list, op, step, Family::Permute, 0, is_forward(step) ? 4 : 1);
  const Bytes sort = probs.elements() * (8 + 1) + probs.bytes();
  Work w = memory_bound(list, op, step, Family::Permute, is_forward(step) ? sort : 0, is_forward(step) ? 8 : 3);
  if (is_forward(step)) w.traffic += 4 * sort;
  return w;
}

// The exchange itself is a collective. Beside it: rows are sorted by local expert in a copy of their
// own where there are several, and a gather (or reduction) over expert-tensor ranks has its stage.
Work exchange_rows(const OpList& list, const Op& op, int step) {
  const MoeAttr& a = std::get<MoeAttr>(op.attr);
  const auto& tensors = op.kind == OpKind::Dispatch ? op.outputs : op.inputs; // the experts' side
  Bytes rows = 0;
  for (TensorId t : tensors) rows += list.tensor(t).bytes();
  const auto& collectives = is_forward(step) ? op.collectives : step_of(op, step).collectives;
  std::int64_t etp = 1;
  for (const Collective& c : collectives)
    if (c.group == Group::Etp) etp = c.ranks;
  const bool sorts = a.local_experts > 1;
  Work w;
  w.family = sorts ? Family::Permute : Family::None;
  w.scratch = (sorts ? rows : 0) + (etp > 1 ? rows / etp : 0);
  w.traffic = sorts ? 2 * rows : 0;
  w.size = static_cast<double>(w.traffic);
  w.kernels = sorts ? 1 : 0;
  return w;
}

Work unpermute(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Permute);
}

} // namespace gdn::model::upstream
