#include <optional>

#include "reference/conv.h"
#include "reference/gates.h"
#include "reference/heads.h"
#include "reference/l2norm.h"
#include "reference/mlp.h"
#include "reference/norm.h"
#include "reference/rule.h"
#include "reference/rule_rounded.h"
#include "trainer/cpu/context.h"
#include "trainer/cpu/ops.h"
#include "trainer/cpu/states.h"

namespace gdn::trainer::cpu {

using model::GdnAttr;

namespace {

// Channels of this rank's heads in the sections q, k, v.
std::vector<std::int64_t> channels_of(const GdnAttr& a) { return {a.key_heads * a.key_dim, a.key_heads * a.key_dim, a.value_heads * a.value_dim}; }

// inputs qkv [R, C]; outputs conv [R, C]; parameters weight [C, taps], bias [C].
struct ConvParams {
  std::span<std::byte> scratch;
  HeadSlice weight;
  std::optional<HeadSlice> bias;
  explicit ConvParams(const OpCall& c);
  View bias_value() const { return bias ? bias->value() : View{}; }
};
Bytes conv_scratch(const model::OpList& list, const model::Op& op, int step) {
  const std::int64_t channels = list.tensor(op.inputs[0]).cols();
  Bytes bytes = HeadSlice::scratch_bytes(op, 0, channels, std::get<GdnAttr>(op.attr).kernel, step);
  if (op.params.size() > 1) bytes += HeadSlice::scratch_bytes(op, 1, channels, 1, step);
  return bytes;
}
std::span<std::byte> scratch_of(const OpCall& c, Bytes bytes) { return bytes > 0 ? c.scratch(bytes) : std::span<std::byte>(); }
ConvParams::ConvParams(const OpCall& c)
    : scratch(scratch_of(c, conv_scratch(c.list(), c.op(), c.step()))), weight(c, 0, channels_of(c.attr<GdnAttr>()), c.attr<GdnAttr>().kernel, scratch) {
  if (c.op().params.size() > 1) bias.emplace(c, 1, channels_of(c.attr<GdnAttr>()), 1, scratch);
}
template <reference::Activation A> void conv_forward(const OpCall& c) {
  const View x = c.in(0);
  const ConvParams p(c);
  with_type(x.dtype, [&]<class T>() {
    if (c.batch().states)
      return conv_states<T>(*c.batch().states, A, c.batch().sequences, mat<T>(x), values(p.weight.value()), values(as_row(p.bias_value())),
                            mat<T>(c.out(0)));
    reference::conv_forward<T>(A, c.batch().sequences, mat<T>(x), values(p.weight.value()), values(as_row(p.bias_value())), mat<T>(c.out(0)));
  });
}
template <reference::Activation A> void conv_backward(const OpCall& c) {
  const View x = c.in(0);
  ConvParams p(c);
  const View dw = p.weight.gradient(), db = p.bias ? p.bias->gradient() : View{};
  with_type(x.dtype, [&]<class T>() {
    reference::conv_backward<T>(A, c.batch().sequences, mat<T>(x), values(p.weight.value()), values(as_row(p.bias_value())), mat<T>(c.d_out(0)),
                                grad<T>(c.d_in(0)), values(dw), values(as_row(db)));
  });
  p.weight.finish();
  if (p.bias) p.bias->finish();
}

void silu_forward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() { reference::silu_forward<T>(mat<T>(c.in(0)), mat<T>(c.out(0))); });
}
void silu_backward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::silu_backward<T>(mat<T>(c.in(0)), mat<T>(c.d_out(0)), grad<T>(c.d_in(0)));
  });
}

// inputs q|k; outputs the normalised q|k, rstd per head. Backward reads its outputs.
void l2norm_forward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::l2norm_forward<T>(c.attr<GdnAttr>().key_dim, mat<T>(c.in(0)), mat<T>(c.out(0)), values(c.out(1)));
  });
}
void l2norm_backward(const OpCall& c) {
  with_type(c.out(0).dtype, [&]<class T>() {
    reference::l2norm_backward<T>(c.attr<GdnAttr>().key_dim, mat<T>(c.out(0)), values(c.out(1)), mat<T>(c.d_out(0)),
                                  grad<T>(c.d_in(0)));
  });
}

struct Expansion {
  std::int64_t head, repeat;
  explicit Expansion(const OpCall& c) {
    const model::Tensor &x = c.list().tensor(c.op().inputs[0]), &y = c.list().tensor(c.op().outputs[0]);
    head = y.shape.back();
    repeat = y.cols() / x.cols();
  }
};
void expand_forward(const OpCall& c) {
  const Expansion e(c);
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::repeat_heads_forward<T>(e.head, e.repeat, mat<T>(c.in(0)), mat<T>(c.out(0)));
  });
}
void expand_backward(const OpCall& c) {
  const Expansion e(c);
  const View dy = c.d_out(0);
  with_type(dy.dtype, [&]<class T>() { reference::repeat_heads_backward<T>(e.head, e.repeat, mat<T>(dy), grad<T>(c.d_in(0))); });
}

// inputs beta logits, alpha [R, Hv]; outputs g, beta; parameters A_log, dt_bias.
Bytes gate_scratch(const model::OpList&, const model::Op& op, int step) {
  const std::int64_t heads = std::get<GdnAttr>(op.attr).value_heads;
  return HeadSlice::scratch_bytes(op, 0, heads, 1, step) + HeadSlice::scratch_bytes(op, 1, heads, 1, step);
}
void gates_forward(const OpCall& c) {
  const std::int64_t heads = c.attr<GdnAttr>().value_heads;
  std::span<std::byte> scratch = scratch_of(c, gate_scratch(c.list(), c.op(), -1));
  const HeadSlice a_log(c, 0, {heads}, 1, scratch), dt_bias(c, 1, {heads}, 1, scratch);
  reference::gates_forward(values(c.in(1)), values(c.in(0)), values(as_row(a_log.value())), values(as_row(dt_bias.value())),
                           c.attr<GdnAttr>().negative_eigenvalues, values(c.out(0)), values(c.out(1)));
}
void gates_backward(const OpCall& c) {
  const std::int64_t heads = c.attr<GdnAttr>().value_heads;
  std::span<std::byte> scratch = scratch_of(c, gate_scratch(c.list(), c.op(), c.step()));
  HeadSlice a_log(c, 0, {heads}, 1, scratch), dt_bias(c, 1, {heads}, 1, scratch);
  reference::GatesBackward p;
  p.b = values(c.in(0));
  p.alpha = values(c.in(1));
  p.a_log = values(as_row(a_log.value()));
  p.dt_bias = values(as_row(dt_bias.value()));
  p.dg = values(c.d_out(0));
  p.dbeta = values(c.d_out(1));
  p.db = values_grad(c.d_in(0));
  p.dalpha = values_grad(c.d_in(1));
  p.da_log = values(as_row(a_log.gradient()));
  p.ddt_bias = values(as_row(dt_bias.gradient()));
  reference::gates_backward(p, c.attr<GdnAttr>().negative_eigenvalues);
  a_log.finish();
  dt_bias.finish();
}

reference::RuleShape shape_of(const model::OpList& list, const model::Op& op) {
  const auto& a = std::get<GdnAttr>(op.attr);
  reference::RuleShape s;
  s.key_heads = list.tensor(op.inputs[0]).cols() / a.key_dim;
  s.value_heads = a.value_heads;
  s.key_dim = a.key_dim;
  s.value_dim = a.value_dim;
  s.l2norm = a.normalise;
  s.l2_eps = a.eps;
  return s;
}

// Backward rebuilds the chunk states of one sequence at a time; one sequence of all rows needs most.
Bytes rule_scratch(const model::OpList& list, const model::Op& op, int step) {
  if (step < 0) return 0;
  const model::Tensor& v = list.tensor(op.inputs[2]);
  const std::int64_t offsets[] = {0, v.rows()};
  return reference::rule_backward_scratch_bytes(shape_of(list, op), offsets, size_of(v.dtype), false);
}

// inputs q, k, v, g, beta; outputs o, g_cum, A and, normalising inside, q_hat, k_hat and their rstd.
template <class T> reference::RuleForward<T> forward_of(const OpCall& c) {
  reference::RuleForward<T> p;
  p.q = mat<T>(c.in(0));
  p.k = mat<T>(c.in(1));
  p.v = mat<T>(c.in(2));
  p.g = values(c.in(3));
  p.beta = values(c.in(4));
  p.o = mat<T>(c.out(0));
  p.g_cum = values(c.out(1));
  p.inverse = mat<T>(c.out(2));
  if (c.attr<GdnAttr>().normalise) {
    p.q_norm = mat<T>(c.out(3));
    p.k_norm = mat<T>(c.out(4));
    p.q_rstd = values(c.out(5));
    p.k_rstd = values(c.out(6));
  }
  return p;
}
void rule_forward(const OpCall& c) {
  const reference::RuleShape shape = shape_of(c.list(), c.op());
  with_type(c.in(2).dtype, [&]<class T>() {
    const reference::RuleForward<T> p = forward_of<T>(c);
    if (c.batch().states) return rule_states<T>(*c.batch().states, shape, c.batch().sequences, p);
    reference::rule_chunk_forward<T>(shape, c.batch().sequences, p);
  });
}
void rounded_forward(const OpCall& c) {
  reference::rule_rounded_forward(shape_of(c.list(), c.op()), c.batch().sequences, forward_of<double>(c));
}

template <class T> reference::RuleBackward<T> backward_of(const OpCall& c) {
  reference::RuleBackward<T> p;
  if (c.attr<GdnAttr>().normalise) {
    p.q_norm = mat<T>(c.out(3));
    p.k_norm = mat<T>(c.out(4));
    p.q_rstd = values(c.out(5));
    p.k_rstd = values(c.out(6));
  } else {
    p.q = mat<T>(c.in(0));
    p.k = mat<T>(c.in(1));
  }
  p.v = mat<T>(c.in(2));
  p.beta = values(c.in(4));
  p.g_cum = values(c.out(1));
  p.inverse = mat<T>(c.out(2));
  p.d_o = mat<T>(c.d_out(0));
  p.dq = grad<T>(c.d_in(0));
  p.dk = grad<T>(c.d_in(1));
  p.dv = grad<T>(c.d_in(2));
  p.dg = values_grad(c.d_in(3));
  p.dbeta = values_grad(c.d_in(4));
  p.scratch = c.scratch(rule_scratch(c.list(), c.op(), c.step()));
  return p;
}
void rule_backward(const OpCall& c) {
  with_type(c.d_out(0).dtype, [&]<class T>() {
    reference::rule_chunk_backward<T>(shape_of(c.list(), c.op()), c.batch().sequences, backward_of<T>(c));
  });
}
void rounded_backward(const OpCall& c) {
  reference::rule_rounded_backward(shape_of(c.list(), c.op()), c.batch().sequences, backward_of<double>(c));
}

// inputs o, z [R, Hv, dv]; outputs y, rstd and, where norm and gate are two ops, the normalised o.
reference::RmsNorm gated_norm_of(const OpCall& c) {
  return {c.attr<GdnAttr>().value_dim, false, c.attr<GdnAttr>().eps};
}
void gated_norm_forward(const OpCall& c) {
  const bool keeps = c.op().outputs.size() > 2;
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::gated_norm_forward<T>(gated_norm_of(c), mat<T>(c.in(0)), mat<T>(c.in(1)),
                                     values(c.param(0, 1, c.attr<GdnAttr>().value_dim)), mat<T>(c.out(0)), values(c.out(1)),
                                     keeps ? mat<T>(c.out(2)) : Mat<T>());
  });
}
void gated_norm_backward(const OpCall& c) {
  const bool keeps = c.op().outputs.size() > 2;
  const std::int64_t dv = c.attr<GdnAttr>().value_dim;
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::gated_norm_backward<T>(gated_norm_of(c), mat<T>(c.in(0)), mat<T>(c.in(1)), values(c.param(0, 1, dv)),
                                      values(c.out(1)), mat<T>(c.d_out(0)), grad<T>(c.d_in(0)), grad<T>(c.d_in(1)),
                                      values(c.param_grad(0, 1, dv)), keeps ? mat<T>(c.out(2)) : Mat<T>());
  });
}

} // namespace

std::span<const Entry> gdn_ops() {
  using reference::Activation;
  static const Entry ops[] = {
      {model::OpKind::ConvSilu, {conv_forward<Activation::Silu>, conv_backward<Activation::Silu>, conv_scratch}},
      {model::OpKind::Conv, {conv_forward<Activation::None>, conv_backward<Activation::None>, conv_scratch}},
      {model::OpKind::Silu, {silu_forward, silu_backward}},
      {model::OpKind::L2Norm, {l2norm_forward, l2norm_backward}},
      {model::OpKind::ExpandHeads, {expand_forward, expand_backward}},
      {model::OpKind::Gates, {gates_forward, gates_backward, gate_scratch}},
      {model::OpKind::Rule, {rule_forward, rule_backward, rule_scratch}},
      {model::OpKind::GatedNorm, {gated_norm_forward, gated_norm_backward}},
  };
  return ops;
}
OpFunctions rounded_rule() { return {rounded_forward, rounded_backward, rule_scratch}; }

} // namespace gdn::trainer::cpu
