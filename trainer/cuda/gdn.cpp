#include <cmath>
#include <optional>

#include "kernels/common/elementwise.h"
#include "kernels/describe/own.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/chunk_forward.h"
#include "kernels/gdn/conv.h"
#include "kernels/gdn/decode.h"
#include "kernels/gdn/gated_norm.h"
#include "kernels/gdn/gates.h"
#include "kernels/gdn/gdn_pre.h"
#include "kernels/norm/head_norm.h"
#include "trainer/cuda/context.h"
#include "trainer/cuda/states.h"

namespace gdn::trainer::cuda {

using kernels::Bf16;
using model::GdnAttr;

namespace {

// Sizes of the op over the sequences that the batch really has.
kernels::GdnShape gdn_shape(const OpCall& c, Engine& e) {
  kernels::GdnShape s = kernels::gdn_shape_of(c.list(), c.op());
  s.sequences = e.batch(c).sequences;
  return s;
}

// ------------------------------------------------------------------------------------- front end ----

// Channels of this rank's heads in the sections q, k, v.
std::vector<std::int64_t> channels_of(const GdnAttr& a) { return {a.key_heads * a.key_dim, a.key_heads * a.key_dim, a.value_heads * a.value_dim}; }

// inputs qkv [R, C]; outputs conv [R, C]; parameters weight [C, 4], bias [C].
struct ConvOperands {
  LaunchContext memory;
  HeadSlice weight;
  std::optional<HeadSlice> bias;
  ConvOperands(const OpCall& c, Engine& e)
      : memory(ranks_memory(c, e)), weight(c, e, 0, channels_of(c.attr<GdnAttr>()), c.attr<GdnAttr>().kernel, memory) {
    if (c.op().params.size() > 1) bias.emplace(c, e, 1, channels_of(c.attr<GdnAttr>()), 1, memory);
  }
  kernels::Conv conv(const OpCall& c, Engine& e, bool silu) const {
    return {silu, matrix(c.in(0)), matrix(weight.value()), bias ? matrix(as_row(bias->value())) : Matrix{}, e.batch(c).positions};
  }
};
template <bool kSilu> void conv_forward(const OpCall& c, Engine& e) {
  const ConvOperands p(c, e);
  if (c.batch().states) return conv_states(c, e, p.conv(c, e, kSilu), 0, matrix(c.out(0)));
  kernels::conv_forward(p.conv(c, e, kSilu), matrix(c.out(0)), e.launch());
}
template <bool kSilu> void conv_backward(const OpCall& c, Engine& e) {
  ConvOperands p(c, e);
  const View dw = p.weight.gradient(), db = p.bias ? p.bias->gradient() : View{};
  kernels::conv_backward(p.conv(c, e, kSilu), matrix(c.d_out(0)), gradient(c.d_in(0)), data<float>(dw), data<float>(db), e.launch(c));
  p.weight.finish();
  if (p.bias) p.bias->finish();
}

void silu_forward(const OpCall& c, Engine& e) { kernels::silu_forward(matrix(c.in(0)), matrix(c.out(0)), e.launch()); }
void silu_backward(const OpCall& c, Engine& e) {
  kernels::silu_backward(matrix(c.in(0)), matrix(c.d_out(0)), gradient(c.d_in(0)), e.launch());
}

// L2 norm of heads of `dim` columns, all of x's rows.
constexpr float kL2Eps = 1e-6f;
kernels::HeadNorm l2_of(const View& x, std::int64_t dim) {
  kernels::HeadNorm n;
  n.units = x.rows * x.cols / dim;
  n.dim = static_cast<int>(dim);
  n.mean = false;
  n.eps = kL2Eps;
  return n;
}

// inputs q|k; outputs the normalised q|k, rstd per head. Backward reads its outputs.
void l2norm_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0);
  kernels::head_norm_forward(l2_of(x, c.attr<GdnAttr>().key_dim), matrix(x), matrix(c.out(0)), data<float>(c.out(1)), e.launch());
}
void l2norm_backward(const OpCall& c, Engine& e) {
  const View y = c.out(0);
  kernels::head_norm_backward(l2_of(y, c.attr<GdnAttr>().key_dim), {.x = matrix(y), .normalised = true, .rstd = data<float>(c.out(1)),
                                                                   .dy = matrix(c.d_out(0)), .dx = gradient(c.d_in(0))}, e.launch());
}

struct Expansion {
  std::int64_t head, repeat;
  explicit Expansion(const OpCall& c) {
    const model::Tensor &x = c.list().tensor(c.op().inputs[0]), &y = c.list().tensor(c.op().outputs[0]);
    head = y.shape.back();
    repeat = y.cols() / x.cols();
  }
};
void expand_forward(const OpCall& c, Engine& e) {
  const Expansion x(c);
  kernels::repeat_heads_forward(matrix(c.in(0)), x.head, x.repeat, matrix(c.out(0)), e.launch());
}
void expand_backward(const OpCall& c, Engine& e) {
  const Expansion x(c);
  kernels::repeat_heads_backward(matrix(c.d_out(0)), x.head, x.repeat, gradient(c.d_in(0)), e.launch());
}

// inputs beta logits, alpha [R, Hv]; outputs g, beta; parameters A_log, dt_bias.
float beta_factor(const OpCall& c) { return c.attr<GdnAttr>().negative_eigenvalues ? 2.0f : 1.0f; }
struct GateOperands {
  LaunchContext memory;
  HeadSlice a_log, dt_bias;
  GateOperands(const OpCall& c, Engine& e)
      : memory(ranks_memory(c, e)), a_log(c, e, 0, {c.attr<GdnAttr>().value_heads}, 1, memory), dt_bias(c, e, 1, {c.attr<GdnAttr>().value_heads}, 1, memory) {}
};
void gates_forward(const OpCall& c, Engine& e) {
  const GateOperands p(c, e);
  kernels::decay_forward(matrix(c.in(1)), matrix(as_row(p.a_log.value())), matrix(as_row(p.dt_bias.value())), 1, matrix(c.out(0)), e.launch());
  kernels::sigmoid_forward(matrix(c.in(0)), beta_factor(c), matrix(c.out(1)), e.launch());
}
void gates_backward(const OpCall& c, Engine& e) {
  GateOperands p(c, e);
  const View d_a_log = p.a_log.gradient(), d_dt_bias = p.dt_bias.gradient();
  kernels::decay_backward({.f = matrix(c.in(1)), .a_log = matrix(as_row(p.a_log.value())), .dt_bias = matrix(as_row(p.dt_bias.value())),
                           .dg = matrix(c.d_out(0)), .df = gradient(c.d_in(1)), .d_a_log = data<float>(d_a_log),
                           .d_dt_bias = data<float>(d_dt_bias)}, e.launch(c));
  p.a_log.finish();
  p.dt_bias.finish();
  kernels::sigmoid_backward(matrix(c.in(0)), beta_factor(c), matrix(c.d_out(1)), gradient(c.d_in(0)), e.launch());
}

// The fused front end. inputs qkv, beta logits, alpha; outputs q, k, v, g, beta; parameters conv, A_log, dt_bias, [bias].
struct PreOperands {
  LaunchContext memory;
  HeadSlice conv, a_log, dt_bias;
  std::optional<HeadSlice> bias;
  PreOperands(const OpCall& c, Engine& e)
      : memory(ranks_memory(c, e)), conv(c, e, 0, channels_of(c.attr<GdnAttr>()), c.attr<GdnAttr>().kernel, memory),
        a_log(c, e, 1, {c.attr<GdnAttr>().value_heads}, 1, memory), dt_bias(c, e, 2, {c.attr<GdnAttr>().value_heads}, 1, memory) {
    if (c.op().params.size() > 3) bias.emplace(c, e, 3, channels_of(c.attr<GdnAttr>()), 1, memory);
  }
  void finish() {
    for (HeadSlice* s : {&conv, &a_log, &dt_bias}) s->finish();
    if (bias) bias->finish();
  }
};
kernels::GdnPreInputs pre_of(const OpCall& c, Engine& e, const PreOperands& p) {
  const auto& a = c.attr<GdnAttr>();
  const View qkv = c.in(0), beta = c.in(1), alpha = c.in(2);
  kernels::GdnPreInputs in;
  in.shape = gdn_shape(c, e);
  in.table = e.batch(c).table;
  in.qkv = data<Bf16>(qkv);
  in.qkv_stride = qkv.stride;
  in.beta_logits = data<Bf16>(beta);
  in.beta_stride = beta.stride;
  in.alpha = data<Bf16>(alpha);
  in.alpha_stride = alpha.stride;
  in.conv_weight = data<Bf16>(p.conv.value());
  if (p.bias) in.conv_bias = data<Bf16>(p.bias->value());
  in.a_log = data<float>(p.a_log.value());
  in.dt_bias = data<float>(p.dt_bias.value());
  in.normalise = a.normalise;
  in.epsilon = kL2Eps;
  in.double_beta = a.negative_eigenvalues;
  return in;
}
// The same by the kernels of its plain ops, section by section.
void pre_states(const OpCall& c, Engine& e, const PreOperands& p) {
  const auto& a = c.attr<GdnAttr>();
  const kernels::Conv conv{true, matrix(c.in(0)), matrix(p.conv.value()), p.bias ? matrix(as_row(p.bias->value())) : Matrix{}, nullptr};
  std::int64_t first = 0;
  for (size_t i : {0, 1, 2}) {
    const View y = c.out(i);
    conv_states(c, e, conv, first, matrix(y));
    if (i < 2 && a.normalise) kernels::head_norm_forward(l2_of(y, a.key_dim), matrix(y), matrix(y), nullptr, e.launch());
    first += y.cols;
  }
  kernels::decay_forward(matrix(c.in(2)), matrix(as_row(p.a_log.value())), matrix(as_row(p.dt_bias.value())), 1, matrix(c.out(3)), e.launch());
  kernels::sigmoid_forward(matrix(c.in(1)), beta_factor(c), matrix(c.out(4)), e.launch());
}
void pre_forward(const OpCall& c, Engine& e) {
  const PreOperands operands(c, e);
  if (c.batch().states) return pre_states(c, e, operands);
  kernels::gdn_pre_forward({pre_of(c, e, operands), data<Bf16>(c.out(0)), data<Bf16>(c.out(1)), data<Bf16>(c.out(2)), data<float>(c.out(3)),
                            data<float>(c.out(4))}, e.launch());
}
void pre_backward(const OpCall& c, Engine& e) {
  PreOperands operands(c, e);
  kernels::GdnPreBackwardParams p;
  p.in = pre_of(c, e, operands);
  p.dq = data<Bf16>(contiguous(c, c.d_out(0)));
  p.dk = data<Bf16>(contiguous(c, c.d_out(1)));
  p.dv = data<Bf16>(contiguous(c, c.d_out(2)));
  p.dg = data<float>(contiguous(c, c.d_out(3)));
  p.dbeta = data<float>(contiguous(c, c.d_out(4)));
  const View d_qkv = only_written(c, c.d_in(0)).to, d_beta = only_written(c, c.d_in(1)).to, d_alpha = only_written(c, c.d_in(2)).to;
  p.d_qkv = data<Bf16>(d_qkv);
  p.d_qkv_stride = d_qkv.stride;
  p.d_beta_logits = data<Bf16>(d_beta);
  p.d_beta_stride = d_beta.stride;
  p.d_alpha = data<Bf16>(d_alpha);
  p.d_alpha_stride = d_alpha.stride;
  p.d_conv_weight = data<float>(operands.conv.gradient());
  p.d_a_log = data<float>(operands.a_log.gradient());
  p.d_dt_bias = data<float>(operands.dt_bias.gradient());
  if (operands.bias) p.d_conv_bias = data<float>(operands.bias->gradient());
  kernels::gdn_pre_backward(p, e.launch(c));
  operands.finish();
}

// ------------------------------------------------------------------------------------------ rule ----

kernels::GdnTokens tokens(const View& v, std::int64_t width) { return {data<Bf16>(v), v.stride, width}; }

// beta in fp32: as it is, or converted into scratch.
const float* fp32_beta(const View& beta, LaunchContext& context) {
  if (beta.dtype == DType::FP32) return data<float>(beta);
  const Matrix wide{take(context, beta.rows * beta.cols * 4), DType::FP32, beta.rows, beta.cols, beta.cols};
  kernels::copy(matrix(beta), {wide, false}, context);
  return static_cast<const float*>(wide.data);
}

// Token by token from the requests' states. What a backward pass reads is not made.
void rule_steps(const OpCall& c, Engine& e) {
  const auto& a = c.attr<GdnAttr>();
  LaunchContext context = e.launch(c);
  const View q = c.in(0);
  kernels::GdnDecodeRuleParams p;
  p.batch = decode_batch(c, e);
  p.key_heads = static_cast<int>(q.cols / a.key_dim);
  p.value_heads = static_cast<int>(a.value_heads);
  p.key_dim = static_cast<int>(a.key_dim);
  p.value_dim = static_cast<int>(a.value_dim);
  p.q = tokens(q, a.key_dim);
  p.k = tokens(c.in(1), a.key_dim);
  p.v = tokens(c.in(2), a.value_dim);
  p.g = data<float>(contiguous(c, c.in(3)));
  p.beta = fp32_beta(c.in(4), context);
  p.scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
  p.l2_norm = a.normalise;
  p.l2_epsilon = kL2Eps;
  p.state = data<float>(c.batch().states->recurrent);
  p.o = data<Bf16>(contiguous(c, c.out(0)));
  p.token_state = data<float>(c.batch().states->token_recurrent);
  for (size_t i = 1; i < c.op().outputs.size(); ++i) c.out(i);
  kernels::gdn_decode_rule(p, context);
}

// inputs q, k, v, g, beta; outputs o, g_cum, A and, normalising inside, q_hat, k_hat and their rstd. A holds the
// kernels' matrix N, T = I - diag(beta) N for the chunk's inverse T (kernels/gdn/NOTES.md).
void rule_forward(const OpCall& c, Engine& e) {
  const SequenceStates* const states = c.batch().states;
  if (states && by_token(c)) return rule_steps(c, e);
  const auto& a = c.attr<GdnAttr>();
  LaunchContext context = e.launch(c);
  kernels::GdnChunkForwardParams p;
  p.shape = gdn_shape(c, e);
  p.table = e.batch(c).table;
  View q = c.in(0), k = c.in(1);
  if (a.normalise)
    for (size_t i : {0, 1}) {
      View& x = i == 0 ? q : k;
      const View hat = c.out(3 + i);
      kernels::head_norm_forward(l2_of(x, a.key_dim), matrix(x), matrix(hat), data<float>(c.out(5 + i)), context);
      x = hat;
    }
  p.q = tokens(q, a.key_dim);
  p.k = tokens(k, a.key_dim);
  p.v = tokens(c.in(2), a.value_dim);
  p.g = data<float>(contiguous(c, c.in(3)));
  p.beta = fp32_beta(c.in(4), context);
  p.scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
  p.o = data<Bf16>(contiguous(c, c.out(0)));
  p.g_cum = data<float>(c.out(1));
  p.n = data<Bf16>(c.out(2));
  if (states) {
    p.initial_state = p.final_state = data<float>(states->recurrent);
    p.state_slots = e.batch(c).slots;
  }
  kernels::gdn_chunk_forward(p, context);
}

void rule_backward(const OpCall& c, Engine& e) {
  const auto& a = c.attr<GdnAttr>();
  LaunchContext context = e.launch(c);
  kernels::GdnChunkBackwardParams p;
  p.shape = gdn_shape(c, e);
  p.table = e.batch(c).table;
  const View q = a.normalise ? c.out(3) : c.in(0), k = a.normalise ? c.out(4) : c.in(1), beta = c.in(4);
  p.q = tokens(q, a.key_dim);
  p.k = tokens(k, a.key_dim);
  p.v = tokens(c.in(2), a.value_dim);
  p.g_cum = data<float>(c.out(1));
  p.beta = fp32_beta(beta, context);
  p.scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
  p.n = data<Bf16>(c.out(2));
  p.d_o = tokens(c.d_out(0), a.value_dim);
  const GradView d[] = {c.d_in(0), c.d_in(1)};
  Bf16* raw[2]; // gradients of q and k as the kernel sees them
  for (int i : {0, 1}) {
    if (a.normalise) raw[i] = static_cast<Bf16*>(take(context, q.rows * q.cols * 2));
    else raw[i] = data<Bf16>(contiguous(c, only_written(c, d[i]).to));
  }
  p.dq = raw[0];
  p.dk = raw[1];
  p.dv = data<Bf16>(contiguous(c, only_written(c, c.d_in(2)).to));
  p.dg = data<float>(contiguous(c, only_written(c, c.d_in(3)).to));
  const GradView d_beta = c.d_in(4);
  const bool narrow = beta.dtype != DType::FP32;
  const Matrix wide{narrow ? take(context, beta.rows * beta.cols * 4) : nullptr, DType::FP32, beta.rows, beta.cols, beta.cols};
  p.dbeta = narrow ? static_cast<float*>(wide.data) : data<float>(contiguous(c, only_written(c, d_beta).to));
  kernels::gdn_chunk_backward(p, context);
  if (narrow) kernels::copy(wide, gradient(d_beta), context);
  if (!a.normalise) return;
  for (size_t i : {0, 1}) {
    const View hat = i == 0 ? q : k;
    kernels::head_norm_backward(l2_of(hat, a.key_dim), {.x = matrix(hat), .normalised = true, .rstd = data<float>(c.out(5 + i)),
                                                       .dy = {raw[i], hat.dtype, hat.rows, hat.cols, hat.cols}, .dx = gradient(d[i])}, context);
  }
}

// ------------------------------------------------------------------------------------ gated norm ----

// inputs o, z [R, Hv, dv]; outputs y, rstd and, where norm and gate are two ops, the normalised o.
kernels::GatedNormInputs gated_norm_of(const OpCall& c) {
  const auto& a = c.attr<GdnAttr>();
  const View o = c.in(0), z = c.in(1);
  return {o.rows, static_cast<int>(a.value_heads), static_cast<int>(a.value_dim), data<Bf16>(contiguous(c, o)), data<Bf16>(z), z.stride,
          data<Bf16>(c.param(0, 1, a.value_dim)), static_cast<float>(a.eps)};
}
kernels::HeadNorm norm_of_heads(const OpCall& c) {
  const auto& a = c.attr<GdnAttr>();
  kernels::HeadNorm n;
  n.units = c.list().tensor(c.op().inputs[0]).elements() / a.value_dim;
  n.dim = static_cast<int>(a.value_dim);
  n.weight = matrix(c.param(0, 1, a.value_dim));
  n.eps = static_cast<float>(a.eps);
  return n;
}
void gated_norm_forward(const OpCall& c, Engine& e) {
  if (c.op().outputs.size() == 2) return kernels::gated_norm_forward({gated_norm_of(c), data<Bf16>(c.out(0)), data<float>(c.out(1))}, e.launch());
  kernels::head_norm_forward(norm_of_heads(c), matrix(c.in(0)), matrix(c.out(2)), data<float>(c.out(1)), e.launch());
  kernels::silu_gate_forward(matrix(c.out(2)), matrix(c.in(1)), matrix(c.out(0)), e.launch());
}
void gated_norm_backward(const OpCall& c, Engine& e) {
  LaunchContext context = e.launch(c);
  float* const d_weight = data<float>(c.param_grad(0, 1, c.attr<GdnAttr>().value_dim));
  const View dy = c.d_out(0);
  if (c.op().outputs.size() == 2) {
    const View d_o = only_written(c, c.d_in(0)).to, dz = only_written(c, c.d_in(1)).to;
    return kernels::gated_norm_backward({gated_norm_of(c), data<float>(c.out(1)), data<Bf16>(contiguous(c, dy)),
                                         data<Bf16>(contiguous(c, d_o)), data<Bf16>(dz), dz.stride, d_weight}, context);
  }
  const Matrix d_norm{take(context, dy.rows * dy.cols * 4), DType::FP32, dy.rows, dy.cols, dy.cols};
  kernels::silu_gate_backward(matrix(c.out(2)), matrix(c.in(1)), matrix(dy), {d_norm, false}, gradient(c.d_in(1)), context);
  kernels::head_norm_backward(norm_of_heads(c), {.x = matrix(c.in(0)), .rstd = data<float>(c.out(1)), .dy = d_norm, .dx = gradient(c.d_in(0)),
                                                 .d_weight = d_weight}, context);
}

} // namespace

std::span<const Entry> gdn_ops() {
  static const Entry ops[] = {
      {model::OpKind::ConvSilu, {conv_forward<true>, conv_backward<true>}},
      {model::OpKind::Conv, {conv_forward<false>, conv_backward<false>}},
      {model::OpKind::Silu, {silu_forward, silu_backward}},
      {model::OpKind::L2Norm, {l2norm_forward, l2norm_backward}},
      {model::OpKind::ExpandHeads, {expand_forward, expand_backward}},
      {model::OpKind::Gates, {gates_forward, gates_backward}},
      {model::OpKind::Rule, {rule_forward, rule_backward}},
      {model::OpKind::GatedNorm, {gated_norm_forward, gated_norm_backward}},
      {model::OpKind::GdnPre, {pre_forward, pre_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
