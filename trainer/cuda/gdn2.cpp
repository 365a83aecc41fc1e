#include <cmath>
#include <optional>

#include "kernels/common/elementwise.h"
#include "kernels/describe/own.h"
#include "kernels/gdn/conv.h"
#include "kernels/gdn/gates.h"
#include "kernels/gdn/gdn2.h"
#include "kernels/norm/head_norm.h"
#include "trainer/cuda/context.h"
#include "trainer/cuda/states.h"

namespace gdn::trainer::cuda {

using model::GdnAttr;

namespace {

// Columns first .. first + count of a matrix.
Matrix columns(Matrix m, std::int64_t first, std::int64_t count) {
  m.data = static_cast<char*>(m.data) + first * size_of(m.dtype);
  m.cols = count;
  return m;
}
Matrix dense(LaunchContext& context, DType dtype, std::int64_t rows, std::int64_t cols) {
  return {take(context, rows * cols * size_of(dtype)), dtype, rows, cols, cols};
}

// ----------------------------------------------------------------------------------------- gates ----

// inputs f, b [R, Hk dk], w [R, Hv dv]; outputs g fp32, b [R, Hv dk], w; parameters A_log [Hk], dt_bias [Hk dk]. Gates of key
// channels are made at Hk heads in scratch, then repeated.
struct Widths {
  std::int64_t rows, keys, dk, repeat;
  explicit Widths(const OpCall& c) {
    const model::Tensor& f = c.list().tensor(c.op().inputs[0]);
    rows = f.rows();
    keys = f.cols();
    dk = c.attr<GdnAttr>().key_dim;
    repeat = c.list().tensor(c.op().outputs[0]).cols() / keys;
  }
};
struct Gdn2GateOperands {
  LaunchContext memory;
  HeadSlice a_log, dt_bias;
  Gdn2GateOperands(const OpCall& c, Engine& e, const Widths& s)
      : memory(ranks_memory(c, e)), a_log(c, e, 0, {s.keys / s.dk}, 1, memory), dt_bias(c, e, 1, {s.keys}, 1, memory) {}
};
void gdn2_gates_forward(const OpCall& c, Engine& e) {
  const Widths s(c);
  const Gdn2GateOperands p(c, e, s);
  LaunchContext context = e.launch(c);
  const Matrix decay = dense(context, DType::FP32, s.rows, s.keys), erase = dense(context, DType::BF16, s.rows, s.keys);
  kernels::decay_forward(matrix(c.in(0)), matrix(as_row(p.a_log.value())), matrix(as_row(p.dt_bias.value())), static_cast<int>(s.dk), decay, context);
  kernels::repeat_heads_forward(decay, s.dk, s.repeat, matrix(c.out(0)), context);
  kernels::sigmoid_forward(matrix(c.in(1)), 1, erase, context);
  kernels::repeat_heads_forward(erase, s.dk, s.repeat, matrix(c.out(1)), context);
  kernels::sigmoid_forward(matrix(c.in(2)), 1, matrix(c.out(2)), context);
}
void gdn2_gates_backward(const OpCall& c, Engine& e) {
  const Widths s(c);
  Gdn2GateOperands p(c, e, s);
  LaunchContext context = e.launch(c);
  const Matrix decay = dense(context, DType::FP32, s.rows, s.keys), erase = dense(context, DType::FP32, s.rows, s.keys);
  kernels::repeat_heads_backward(matrix(c.d_out(0)), s.dk, s.repeat, {decay, false}, context);
  kernels::repeat_heads_backward(matrix(c.d_out(1)), s.dk, s.repeat, {erase, false}, context);
  const View d_a_log = p.a_log.gradient(), d_dt_bias = p.dt_bias.gradient();
  kernels::decay_backward({.f = matrix(c.in(0)), .a_log = matrix(as_row(p.a_log.value())), .dt_bias = matrix(as_row(p.dt_bias.value())),
                           .key_dim = static_cast<int>(s.dk), .dg = decay, .df = gradient(c.d_in(0)),
                           .d_a_log = data<float>(d_a_log), .d_dt_bias = data<float>(d_dt_bias)}, context);
  p.a_log.finish();
  p.dt_bias.finish();
  kernels::sigmoid_backward(matrix(c.in(1)), 1, erase, gradient(c.d_in(1)), context);
  kernels::sigmoid_backward(matrix(c.in(2)), 1, matrix(c.d_out(2)), gradient(c.d_in(2)), context);
}

// ------------------------------------------------------------------------------------------ rule ----

// inputs q, k, v, g, b, w; outputs o, g_cum (not when grouped), A, A_qk: the matrices that chunked kernels keep, and this
// one does not need, hold zeros.
kernels::Gdn2 rule_of(const OpCall& c, Engine& e) {
  const auto& a = c.attr<GdnAttr>();
  kernels::Gdn2 p;
  p.shape = kernels::gdn_shape_of(c.list(), c.op());
  p.shape.sequences = e.batch(c).sequences;
  p.gate_heads = static_cast<int>(c.list().tensor(c.op().inputs[3]).cols() / a.key_dim);
  p.table = e.batch(c).table;
  p.scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
  p.q = matrix(c.in(0));
  p.k = matrix(c.in(1));
  p.v = matrix(c.in(2));
  p.g = matrix(c.in(3));
  p.b = matrix(c.in(4));
  p.w = matrix(c.in(5));
  return p;
}
void gdn2_rule_forward(const OpCall& c, Engine& e) {
  kernels::Gdn2 rule = rule_of(c, e);
  if (const SequenceStates* states = c.batch().states) {
    rule.state = data<float>(states->recurrent);
    rule.slots = e.batch(c).slots;
    rule.token_state = data<float>(states->token_recurrent);
  }
  const size_t matrices = c.attr<GdnAttr>().grouped ? 1 : 2;
  if (matrices == 2) kernels::chunk_sums(rule.g, rule.shape, rule.table, matrix(c.out(1)), e.launch());
  for (size_t i = matrices; i < c.op().outputs.size(); ++i) kernels::fill({matrix(c.out(i)), false}, 0, e.launch());
  kernels::gdn2_forward(rule, matrix(c.out(0)), e.launch());
}
void gdn2_rule_backward(const OpCall& c, Engine& e) {
  for (size_t i = 1; i < c.op().outputs.size(); ++i) c.out(i); // kept, not needed
  kernels::Gdn2Backward d;
  d.d_o = matrix(c.d_out(0));
  d.dq = gradient(c.d_in(0));
  d.dk = gradient(c.d_in(1));
  d.dv = gradient(c.d_in(2));
  d.dg = gradient(c.d_in(3));
  d.db = gradient(c.d_in(4));
  d.dw = gradient(c.d_in(5));
  kernels::gdn2_backward(rule_of(c, e), d, e.launch(c));
}

// ------------------------------------------------------------------------------------- front end ----

// inputs qkv, f, b, w; outputs q, k, v, g, b, w; parameters conv, A_log, dt_bias, [conv bias]. The convolution and its gradient
// are in scratch.
struct FrontEnd {
  const OpCall& c;
  Engine& e;
  LaunchContext context, memory;
  View qkv;
  std::int64_t keys, values; // columns of q, of v
  HeadSlice weight, a_log, dt_bias;
  std::optional<HeadSlice> bias;
  kernels::Conv conv;
  Matrix rows;               // the convolution's output
  FrontEnd(const OpCall& call, Engine& engine)
      : c(call), e(engine), context(engine.launch(call)), memory(ranks_memory(call, engine)), qkv(call.in(0)),
        keys(c.attr<GdnAttr>().key_heads * c.attr<GdnAttr>().key_dim), values(c.attr<GdnAttr>().value_heads * c.attr<GdnAttr>().value_dim),
        weight(c, e, 0, {keys, keys, values}, c.attr<GdnAttr>().kernel, memory), a_log(c, e, 1, {c.attr<GdnAttr>().key_heads}, 1, memory),
        dt_bias(c, e, 2, {keys}, 1, memory) {
    if (c.op().params.size() > 3) bias.emplace(c, e, 3, std::vector<std::int64_t>{keys, keys, values}, 1, memory);
    conv = {true, matrix(qkv), matrix(weight.value()), bias ? matrix(as_row(bias->value())) : Matrix{}, e.batch(c).positions};
    rows = dense(context, DType::BF16, qkv.rows, qkv.cols);
    if (c.batch().states) conv_states(c, e, conv, 0, rows);
    else kernels::conv_forward(conv, rows, context);
  }
  Matrix section(const Matrix& m, size_t i) const { return columns(m, static_cast<std::int64_t>(i) * keys, i < 2 ? keys : values); }
  kernels::HeadNorm norm() const {
    const std::int64_t dim = c.attr<GdnAttr>().key_dim;
    kernels::HeadNorm n;
    n.units = qkv.rows * keys / dim;
    n.dim = static_cast<int>(dim);
    n.mean = false;
    return n;
  }
};
void gdn2_pre_forward(const OpCall& c, Engine& e) {
  const FrontEnd f(c, e);
  const auto& a = c.attr<GdnAttr>();
  for (size_t i : {0, 1, 2})
    if (i < 2 && a.normalise) kernels::head_norm_forward(f.norm(), f.section(f.rows, i), matrix(c.out(i)), nullptr, f.context);
    else kernels::copy(f.section(f.rows, i), {matrix(c.out(i)), false}, f.context);
  kernels::decay_forward(matrix(c.in(1)), matrix(as_row(f.a_log.value())), matrix(as_row(f.dt_bias.value())), static_cast<int>(a.key_dim),
                         matrix(c.out(3)), f.context);
  kernels::sigmoid_forward(matrix(c.in(2)), 1, matrix(c.out(4)), f.context);
  kernels::sigmoid_forward(matrix(c.in(3)), 1, matrix(c.out(5)), f.context);
}
void gdn2_pre_backward(const OpCall& c, Engine& e) {
  FrontEnd f(c, e);
  const auto& a = c.attr<GdnAttr>();
  const Matrix d_rows = dense(f.context, DType::BF16, f.qkv.rows, f.qkv.cols);
  for (size_t i : {0, 1, 2}) {
    const Gradient to{f.section(d_rows, i), false};
    if (i < 2 && a.normalise) kernels::head_norm_backward(f.norm(), {.x = f.section(f.rows, i), .dy = matrix(c.d_out(i)), .dx = to}, f.context);
    else kernels::copy(matrix(c.d_out(i)), to, f.context);
  }
  const View d_weight = f.weight.gradient(), d_bias = f.bias ? f.bias->gradient() : View{}, d_a_log = f.a_log.gradient(), d_dt_bias = f.dt_bias.gradient();
  kernels::conv_backward(f.conv, d_rows, gradient(c.d_in(0)), data<float>(d_weight), data<float>(d_bias), f.context);
  kernels::decay_backward({.f = matrix(c.in(1)), .a_log = matrix(as_row(f.a_log.value())), .dt_bias = matrix(as_row(f.dt_bias.value())),
                           .key_dim = static_cast<int>(a.key_dim), .dg = matrix(c.d_out(3)), .df = gradient(c.d_in(1)),
                           .d_a_log = data<float>(d_a_log), .d_dt_bias = data<float>(d_dt_bias)}, f.context);
  for (HeadSlice* slice : {&f.weight, &f.a_log, &f.dt_bias}) slice->finish();
  if (f.bias) f.bias->finish();
  kernels::sigmoid_backward(matrix(c.in(2)), 1, matrix(c.d_out(4)), gradient(c.d_in(2)), f.context);
  kernels::sigmoid_backward(matrix(c.in(3)), 1, matrix(c.d_out(5)), gradient(c.d_in(3)), f.context);
}

} // namespace

std::span<const Entry> gdn2_ops() {
  static const Entry ops[] = {
      {model::OpKind::Gdn2Gates, {gdn2_gates_forward, gdn2_gates_backward}},
      {model::OpKind::Gdn2Rule, {gdn2_rule_forward, gdn2_rule_backward}},
      {model::OpKind::Gdn2Pre, {gdn2_pre_forward, gdn2_pre_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
