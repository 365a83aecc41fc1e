#include "model/upstream.h"

// Kinds of stack native, as the libraries behind `upstream` would run them: the fused front ends as a
// chain of their kernels, routing by torch's top-k and sort. [inferred]
namespace gdn::model::upstream {

// Convolution, L2 norm, gates, and the copies that make heads contiguous: intermediate rows are scratch.
Work gdn_pre(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const Tensor& qkv = list.tensor(op.inputs[0]);
  const Bytes partial = is_forward(step) ? 0 : ceil_div(qkv.rows(), 64) * qkv.cols() * a.kernel * 4; // as conv
  Work w = memory_bound(list, op, step, Family::Conv, qkv.bytes() + partial, is_forward(step) ? 4 : 6, 2);
  w.traffic += 2 * partial;
  return w;
}

// Norms, rotations and a copy of v.
Work attention_pre(const OpList& list, const Op& op, int step) {
  const bool norm = std::get<AttentionAttr>(op.attr).qk_norm != QkNorm::None;
  const Bytes between = list.tensor(op.outputs[0]).bytes() + list.tensor(op.outputs[1]).bytes();
  return memory_bound(list, op, step, Family::Norm, norm ? between : 0, norm ? 5 : 3, norm ? 2 : 1);
}

// top_k: logits once, then k values a token. router_loss: softmax over all experts, and its backward.
Work compact_router(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Router, 0, is_forward(step) ? 4 : 3);
}

// A stable radix sort of T k slots by expert: keys and indices twice.
Work sort_slots(const OpList& list, const Op& op, int step) {
  const Bytes slots = list.tensor(op.inputs[1]).bytes();
  return is_forward(step) ? memory_bound(list, op, step, Family::Permute, 4 * slots, 6, 4)
                          : memory_bound(list, op, step, Family::Permute);
}

// One product a row and its sigmoid.
Work shared_score(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Elementwise, 0, is_forward(step) ? 1 : 2);
}

} // namespace gdn::model::upstream
