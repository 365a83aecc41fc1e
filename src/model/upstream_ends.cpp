#include "model/upstream.h"

#include <algorithm>

namespace gdn::model::upstream {

// Forward: partial rows before their reduction over TP. Backward: torch's dense gradient of the
// table, in its own dtype, before it is added to the main gradient; the rows gathered over TP.
Work embedding(const OpList& list, const Op& op, int step) {
  const Tensor& y = list.tensor(op.outputs[0]);
  const std::int64_t tokens = list.tensor(op.inputs[0]).rows();
  const Bytes full = tokens * y.cols() * size_of(y.dtype);
  Work w;
  w.family = Family::Embedding;
  if (is_forward(step)) {
    w.scratch = op.collectives.empty() ? 0 : full;
    w.traffic = 2 * full + y.bytes();
  } else {
    const Bytes dense = op.params[0].elements * size_of(op.params[0].dtype);
    w.scratch = dense + (step_of(op, step).collectives.empty() ? 0 : full);
    w.traffic = 2 * full + 2 * dense + 8 * op.params[0].elements;
    w.kernels = 4;
  }
  w.size = static_cast<double>(w.traffic);
  return w;
}

// Bytes a logit. Unfused: fp32 copy 6, maximum 4, subtraction 8, exponential 8, sum 4, division 8;
// backward: product with the upstream gradient 8, cast 6. Compiled (native fusion): the three
// middle passes are one. Transformer Engine: two reads and one write of bf16, then a scaling.
Work cross_entropy(const OpList& list, const Op& op, int step) {
  const LossAttr& a = std::get<LossAttr>(op.attr);
  const double logits = static_cast<double>(list.tensor(op.inputs[0]).elements());
  const double element = static_cast<double>(size_of(list.tensor(op.inputs[0]).dtype));
  double forward = 38, backward = 14;
  int kernels = 10;
  if (a.fused) {
    forward = 26;
    backward = 10;
    kernels = 5;
  }
  if (a.form == LossForm::Overwrite) {
    forward = 3 * element;
    backward = 2 * element;
    kernels = 2;
  }
  if (a.form == LossForm::Logits) {
    forward = element;
    backward = 2 * element;
    kernels = 1;
  }
  Work w;
  w.family = Family::CrossEntropy;
  w.traffic = static_cast<Bytes>(logits * (is_forward(step) ? forward : backward));
  w.size = static_cast<double>(w.traffic);
  w.kernels = kernels;
  return w;
}

// Chunk by chunk: fp32 logits of the chunk, in backward their bf16 gradient beside them; the head's
// GEMM runs again in backward. With sequence parallelism the gathered input and the unreduced
// gradient are buffers as well.
Work linear_cross_entropy(const OpList& list, const Op& op, int step) {
  const LossAttr& a = std::get<LossAttr>(op.attr);
  const Tensor& x = list.tensor(op.inputs[0]);
  const std::int64_t tokens = list.tensor(op.inputs[1]).rows(), chunk = std::min(a.chunk, tokens);
  const Bytes full = tokens * x.cols() * size_of(x.dtype), logits = chunk * a.vocab;
  const std::int64_t chunks = ceil_div(tokens, chunk);
  const Bytes weight = op.params[0].elements * size_of(op.params[0].dtype);
  const double gemm = 2.0 * static_cast<double>(tokens) * static_cast<double>(op.params[0].elements);
  const bool sequence_parallel = tokens != x.rows();
  Work w;
  w.family = Family::Gemm;
  w.scratch = logits * (is_forward(step) ? 4 : 6) + (sequence_parallel ? full * (is_forward(step) ? 1 : 2) : 0);
  w.flops = is_forward(step) ? gemm : 3 * gemm;
  w.traffic = chunks * weight * (is_forward(step) ? 1 : 3) + full * (is_forward(step) ? 1 : 3) +
              tokens * a.vocab * (is_forward(step) ? 8 : 14);
  w.size = w.flops;
  w.kernels = static_cast<int>(chunks) * (is_forward(step) ? 2 : 4);
  return w;
}

} // namespace gdn::model::upstream
