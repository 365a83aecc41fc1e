#include "model/upstream.h"

namespace gdn::model::upstream {

namespace {

// What context parallelism adds to the core [inferred from Transformer Engine]: the ring holds the
// k and v in use and those arriving, and one partial output; the gather and the exchange hold what
// they bring.
Bytes parallel_scratch(const Op& op, int step, Bytes output) {
  const auto& collectives = is_forward(step) ? op.collectives : step_of(op, step).collectives;
  Bytes scratch = 0;
  for (const Collective& c : collectives)
    scratch += c.kind == CollectiveKind::P2p ? 2 * c.bytes / (c.ranks - 1) + output : c.bytes;
  return scratch;
}

} // namespace

// Fused: cuDNN's flash attention, half of the square; backward sums d:q in fp32 and keeps the row
// sums of o * d:o. Unfused: PyTorch, the whole square, k and v repeated to all heads.
Work core_attention(const OpList& list, const Op& op, int step) {
  const AttentionAttr& a = std::get<AttentionAttr>(op.attr);
  const Tensor &q = list.tensor(op.inputs[0]), &k = list.tensor(op.inputs[1]);
  const double rows = static_cast<double>(q.rows());
  const double square = rows * static_cast<double>(a.heads) * static_cast<double>(a.seq);
  const double products = 4.0 * square * static_cast<double>(a.head_dim); // two, whole square
  Work w = memory_bound(list, op, step, Family::Attention, 0, is_forward(step) ? 1 : 3);
  if (a.fused) {
    w.flops = is_forward(step) ? products / 2 : 2.5 * products / 2;
    if (!is_forward(step)) w.scratch = q.elements() * 4 + q.rows() * a.heads * 4;
  } else {
    const Bytes repeated = a.heads > a.kv_heads ? 2 * k.bytes() / a.kv_heads * a.heads : 0;
    const Bytes scores = static_cast<Bytes>(square) * size_of(q.dtype);
    w.flops = is_forward(step) ? products : 2 * products;
    w.scratch = is_forward(step) ? repeated : 2 * repeated + 2 * scores;
    w.traffic += is_forward(step) ? 2 * scores : 4 * scores;
    w.kernels = is_forward(step) ? 5 : 9;
  }
  w.scratch += parallel_scratch(op, step, q.bytes());
  w.size = w.flops;
  return w;
}

} // namespace gdn::model::upstream
