#include "kernels/attention/core.h"
#include "kernels/common/elementwise.h"
#include "kernels/norm/head_norm.h"
#include "trainer/cuda/context.h"
#include "trainer/cuda/states.h"

namespace gdn::trainer::cuda {

using model::AttentionAttr;
using model::NormAttr;

namespace {

// RMSNorm of heads; one statistic may cover several rows of x (k of all query groups).
kernels::HeadNorm head_norm_of(const OpCall& c) {
  const auto& a = c.attr<NormAttr>();
  const model::Tensor& x = c.list().tensor(c.op().inputs[0]);
  const std::int64_t dim = c.list().tensor(c.op().outputs[0]).shape.back();
  kernels::HeadNorm n;
  n.units = x.elements() / a.group;
  n.dim = static_cast<int>(dim);
  n.span = static_cast<int>(a.group / dim);
  n.zero_centred = a.zero_centred;
  n.weight = matrix(c.param(0, 1, a.group));
  n.eps = static_cast<float>(a.eps);
  return n;
}
void head_norm_forward(const OpCall& c, Engine& e) {
  kernels::head_norm_forward(head_norm_of(c), matrix(c.in(0)), matrix(c.out(0)), data<float>(c.out(1)), e.launch());
}
void head_norm_backward(const OpCall& c, Engine& e) {
  const kernels::HeadNorm n = head_norm_of(c);
  kernels::head_norm_backward(n, {.x = matrix(c.in(0)), .rstd = data<float>(c.out(1)), .dy = matrix(c.d_out(0)), .dx = gradient(c.d_in(0)),
                                  .d_weight = data<float>(c.param_grad(0, 1, n.width()))}, e.launch(c));
}

// Rotation of `heads` heads a token; without a norm or with one.
kernels::HeadNorm rotation_of(const OpCall& c, Engine& e, std::int64_t elements, std::int64_t heads) {
  const auto& a = c.attr<AttentionAttr>();
  kernels::HeadNorm n;
  n.units = elements / a.head_dim;
  n.dim = static_cast<int>(a.head_dim);
  n.normalise = false;
  n.rotary = static_cast<int>(a.rotary_dim);
  n.theta = a.theta;
  n.heads = static_cast<int>(heads);
  n.positions = e.batch(c).local_positions;
  return n;
}
kernels::HeadNorm rope_of(const OpCall& c, Engine& e) {
  const model::Tensor& y = c.list().tensor(c.op().outputs[0]);
  return rotation_of(c, e, y.elements(), y.elements() / e.batch(c).local / c.attr<AttentionAttr>().head_dim);
}
void rope_forward(const OpCall& c, Engine& e) {
  kernels::head_norm_forward(rope_of(c, e), matrix(c.in(0)), matrix(c.out(0)), nullptr, e.launch());
}
void rope_backward(const OpCall& c, Engine& e) {
  kernels::head_norm_backward(rope_of(c, e), {.dy = matrix(c.d_out(0)), .dx = gradient(c.d_in(0))}, e.launch());
}

// The fused front end. inputs: the q, k, v sections of the projection, one row a query group; outputs q, k, v, contiguous
// heads; parameters: the gains of the q and k norms.
kernels::HeadNorm pre_of(const OpCall& c, Engine& e, size_t which) {
  const auto& a = c.attr<AttentionAttr>();
  const model::Tensor& y = c.list().tensor(c.op().outputs[which]);
  const std::int64_t heads = which == 0 ? a.heads : a.kv_heads;
  kernels::HeadNorm n = rotation_of(c, e, y.elements(), heads);
  if (which == 2) n.rotary = 0;
  if (which == 2 || a.qk_norm == model::QkNorm::None) return n;
  n.normalise = true;
  n.span = a.qk_norm == model::QkNorm::WholeVector ? static_cast<int>(heads) : 1;
  n.units /= n.span;
  n.zero_centred = a.zero_centred;
  n.weight = matrix(c.param(which, 1, n.width()));
  n.eps = static_cast<float>(a.eps);
  return n;
}
void attention_pre_forward(const OpCall& c, Engine& e) {
  for (size_t i : {0, 1, 2}) kernels::head_norm_forward(pre_of(c, e, i), matrix(c.in(i)), matrix(c.out(i)), nullptr, e.launch());
}
void attention_pre_backward(const OpCall& c, Engine& e) {
  for (size_t i : {0, 1, 2}) {
    const kernels::HeadNorm n = pre_of(c, e, i);
    kernels::HeadNormBackward p{.dy = matrix(c.d_out(i)), .dx = gradient(c.d_in(i))};
    if (n.normalise) {
      p.x = matrix(c.in(i));
      p.d_weight = data<float>(c.param_grad(i, 1, n.width()));
    }
    kernels::head_norm_backward(n, p, e.launch(c));
  }
}

// inputs q, k, v; outputs o, lse. Without an exchange of its own the op sees whole sequences, whoever brought them together.
kernels::AttentionShape shape_of(const OpCall& c, Engine& e) {
  const auto& a = c.attr<AttentionAttr>();
  const DeviceBatch& b = e.batch(c);
  return {b.tokens, b.sequences, static_cast<int>(a.heads), static_cast<int>(a.kv_heads), static_cast<int>(a.head_dim), b.table};
}
Matrix rows(const OpCall& c, const View& v, Engine& e) { return matrix(with_rows(c, v, e.batch(c).tokens)); }
Gradient rows(const OpCall& c, const GradView& g, Engine& e) { return gradient(with_rows(c, g, e.batch(c).tokens)); }

void core_forward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty()) return gathered_attention_forward(c, e);
  if (c.batch().states) return attention_states(c, e);
  kernels::attention_forward({shape_of(c, e), rows(c, c.in(0), e), rows(c, c.in(1), e), rows(c, c.in(2), e), rows(c, c.out(0), e),
                              data<float>(c.out(1))}, e.launch());
}
void core_backward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty()) return gathered_attention_backward(c, e);
  kernels::attention_backward({shape_of(c, e), rows(c, c.in(0), e), rows(c, c.in(1), e), rows(c, c.in(2), e), rows(c, c.out(0), e),
                               data<float>(c.out(1)), rows(c, c.d_out(0), e), rows(c, c.d_in(0), e), rows(c, c.d_in(1), e),
                               rows(c, c.d_in(2), e)}, e.launch(c));
}

// inputs o, gate; the gate may be a strided view, one row a query group.
std::int64_t gate_rows(const OpCall& c) { return c.list().tensor(c.op().inputs[1]).rows(); }
void output_gate_forward(const OpCall& c, Engine& e) {
  const std::int64_t n = gate_rows(c);
  kernels::sigmoid_gate_forward(matrix(with_rows(c, c.in(0), n)), matrix(with_rows(c, c.in(1), n)), matrix(with_rows(c, c.out(0), n)), e.launch());
}
void output_gate_backward(const OpCall& c, Engine& e) {
  const std::int64_t n = gate_rows(c);
  kernels::sigmoid_gate_backward(matrix(with_rows(c, c.in(0), n)), matrix(with_rows(c, c.in(1), n)), matrix(with_rows(c, c.d_out(0), n)),
                                 gradient(with_rows(c, c.d_in(0), n)), gradient(with_rows(c, c.d_in(1), n)), e.launch());
}

} // namespace

std::span<const Entry> attention_ops() {
  static const Entry ops[] = {
      {model::OpKind::HeadNorm, {head_norm_forward, head_norm_backward}},
      {model::OpKind::Rope, {rope_forward, rope_backward}},
      {model::OpKind::AttentionPre, {attention_pre_forward, attention_pre_backward}},
      {model::OpKind::CoreAttention, {core_forward, core_backward}},
      {model::OpKind::OutputGate, {output_gate_forward, output_gate_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
