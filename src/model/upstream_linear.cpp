#include "model/upstream.h"

namespace gdn::model::upstream {

namespace {

// Products in low precision: the operands weigh less, and a pass in front quantises the input, or once for both
// gradients the output's gradient. Weights are quantised once a step.
void lower_precision(Work& w, const Op& op, int step, std::int64_t in_elements, std::int64_t out_elements, std::int64_t weight_elements) {
  if (op.low.bits == 0) return;
  w.bits = op.low.bits;
  const bool wgrad = !is_forward(step) && !step_of(op, step).param_grads.empty();
  const std::int64_t low = is_forward(step) ? in_elements + weight_elements : wgrad ? in_elements + out_elements : out_elements + weight_elements;
  w.traffic -= low * (16 - op.low.bits) / 8;
  if (wgrad) return;
  w.quantising = static_cast<Bytes>(op.low.traffic * static_cast<double>(is_forward(step) ? in_elements : out_elements));
  ++w.kernels;
}

} // namespace

// One fused kernel; the gain's gradient is reduced in a second one.
Work norm(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Norm, 0, is_forward(step) ? 1 : 2);
}

// cuBLAS GEMMs of Transformer Engine's linear modules; the weight gradient is added to the main
// gradient by the GEMM itself. With sequence parallelism the side that other ranks hold is a buffer
// of the run: the gathered input, the output before its reduction, and the same of gradients.
Work linear(const OpList& list, const Op& op, int step) {
  const LinearAttr& a = std::get<LinearAttr>(op.attr);
  const Tensor &x = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
  const bool shared = a.tp > 1 && a.sequence_parallel;
  const bool gathers = shared && a.mode == TensorParallel::Column, scatters = shared && a.mode == TensorParallel::Row;
  const std::int64_t rows = gathers ? x.rows() * a.tp : x.rows();
  const Bytes in = rows * x.cols() * size_of(x.dtype), out = rows * y.cols() * size_of(y.dtype);
  const Bytes weight = op.params[0].elements * size_of(op.params[0].dtype);
  Work w;
  w.family = Family::Gemm;
  w.flops = 2.0 * static_cast<double>(rows) * static_cast<double>(op.params[0].elements);
  w.size = w.flops;
  w.traffic = in + out + weight;
  if (gathers && op.kind != OpKind::LmHead) w.scratch = in;
  if (scatters) w.scratch = out;
  if (!is_forward(step)) {
    const bool wgrad = !step_of(op, step).param_grads.empty();
    if (wgrad) w.traffic += 8 * op.params[0].elements - weight;
    // Megatron-LM's own linear (tensor_parallel/layers.py): the gathered input lives in a global buffer, the
    // gradient of the whole input until it has been scattered, after wgrad, whose empty result is made anew.
    if (op.kind == OpKind::LmHead) {
      w.scratch = gathers ? in : 0;
      if (wgrad) w.scratch += weight;
    }
    // d:y in another dtype than the operands (router logits in fp32) is rounded first.
    if (y.dtype != x.dtype) w.scratch += y.elements() * size_of(x.dtype);
  }
  lower_precision(w, op, step, rows * x.cols(), rows * y.cols(), op.params[0].elements);
  return w;
}

// One grouped GEMM over the local experts; efficiency goes by rows an expert.
Work grouped_linear(const OpList& list, const Op& op, int step) {
  const MoeAttr& a = std::get<MoeAttr>(op.attr);
  const Tensor &x = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
  const ParamRef& weight = op.params[0];
  Work w;
  w.family = Family::GroupedGemm;
  w.flops = 2.0 * static_cast<double>(x.elements()) * static_cast<double>(y.cols());
  w.size = static_cast<double>(x.rows()) / static_cast<double>(a.local_experts);
  w.traffic = x.bytes() + y.bytes();
  w.traffic += !is_forward(step) && !step_of(op, step).param_grads.empty() ? 8 * weight.elements
                                                                           : weight.elements * size_of(weight.dtype);
  lower_precision(w, op, step, x.elements(), y.elements(), weight.elements);
  return w;
}

} // namespace gdn::model::upstream
