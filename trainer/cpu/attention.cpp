#include <fmt/core.h>

#include "reference/attention.h"
#include "reference/heads.h"
#include "reference/mlp.h"
#include "reference/norm.h"
#include "trainer/cpu/context.h"
#include "trainer/cpu/ops.h"
#include "trainer/cpu/states.h"

namespace gdn::trainer::cpu {

using model::AttentionAttr;
using model::NormAttr;

namespace {

// RMSNorm of heads: rows of x are heads, unless one statistic covers several of them.
struct HeadNormShape {
  reference::RmsNorm norm;
  std::int64_t rows, group;
  explicit HeadNormShape(const OpCall& c) {
    const auto& a = c.attr<NormAttr>();
    const model::Tensor& x = c.list().tensor(c.op().inputs[0]);
    norm = {a.group, a.zero_centred, a.eps};
    group = a.group;
    rows = x.cols() % a.group == 0 ? x.rows() : x.elements() / a.group;
  }
};

View statistic(View v, const HeadNormShape& s) { // [x.elements / group] as [rows, groups of a row]
  v.cols = v.stride = v.rows * v.cols / s.rows;
  v.rows = s.rows;
  return v;
}

// One statistic over several strided rows (k of all query groups): x is gathered first.
bool gathers(const model::OpList& list, const model::Op& op) {
  const model::Tensor& x = list.tensor(op.inputs[0]);
  return x.cols() % std::get<NormAttr>(op.attr).group != 0 && x.row_stride != x.cols();
}
Bytes head_norm_scratch(const model::OpList& list, const model::Op& op, int) {
  return gathers(list, op) ? list.tensor(op.inputs[0]).bytes() : 0;
}
View head_norm_input(const OpCall& c, const HeadNormShape& s) {
  const View x = c.in(0);
  if (!gathers(c.list(), c.op())) return with_rows(c, x, s.rows);
  const View dense{c.scratch(head_norm_scratch(c.list(), c.op(), c.step())).data(), x.dtype, x.rows, x.cols, x.cols};
  with_type(x.dtype, [&]<class T>() { reference::copy<T>(mat<T>(x), mat<T>(dense)); });
  return with_rows(c, dense, s.rows);
}

void head_norm_forward(const OpCall& c) {
  const HeadNormShape s(c);
  const View x = head_norm_input(c, s);
  with_type(x.dtype, [&]<class T>() {
    reference::rms_norm_forward<T>(s.norm, mat<T>(x), values(c.param(0, 1, s.group)), mat<T>(with_rows(c, c.out(0), s.rows)),
                                   values(statistic(c.out(1), s)));
  });
}
void head_norm_backward(const OpCall& c) {
  const HeadNormShape s(c);
  const View x = head_norm_input(c, s);
  with_type(x.dtype, [&]<class T>() {
    reference::rms_norm_backward<T>(s.norm, mat<T>(x), values(c.param(0, 1, s.group)), values(statistic(c.out(1), s)),
                                    mat<T>(with_rows(c, c.d_out(0), s.rows)), grad<T>(with_rows(c, c.d_in(0), s.rows)),
                                    values(c.param_grad(0, 1, s.group)));
  });
}

// Tokens of the rank: rows of head-shaped operands.
std::int64_t tokens_of(const OpCall& c) { return c.local_sequences().back(); }

reference::Rope rope_of(const OpCall& c, bool inverse) {
  const auto& a = c.attr<AttentionAttr>();
  return {a.head_dim, a.rotary_dim, a.theta, inverse};
}
void rope_forward(const OpCall& c) {
  std::vector<std::int64_t> positions(c.local_positions().begin(), c.local_positions().end());
  if (c.batch().states) positions = positions_of(*c.batch().states, c.batch().sequences);
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::rope<T>(rope_of(c, false), c.local_sequences(), positions, mat<T>(with_rows(c, c.in(0), tokens_of(c))),
                       mat<T>(with_rows(c, c.out(0), tokens_of(c))));
  });
}
void rope_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  with_type(dy.dtype, [&]<class T>() {
    reference::rope<T>(rope_of(c, true), c.local_sequences(), c.local_positions(), mat<T>(with_rows(c, dy, tokens_of(c))),
                       grad<T>(with_rows(c, c.d_in(0), tokens_of(c))));
  });
}

// inputs q, k, v; outputs o, lse.
reference::AttentionShape shape_of(const OpCall& c) {
  const auto& a = c.attr<AttentionAttr>();
  if (!a.fused) throw Error(ErrorCode::Config, "unfused core attention is not executed", "gdnplan prices it; use fused attention");
  return {a.heads, a.kv_heads, a.head_dim, 0};
}
// Without an exchange of its own the op sees whole sequences, whoever brought them together.
std::int64_t core_tokens(const OpCall& c) { return c.batch().sequences.back(); }
void core_forward(const OpCall& c) {
  if (!c.op().collectives.empty()) return gathered_attention_forward(c);
  const std::int64_t n = core_tokens(c);
  if (c.batch().states)
    return with_type(c.in(0).dtype, [&]<class T>() {
      attention_states<T>(*c.batch().states, shape_of(c), c.batch().sequences, mat<T>(with_rows(c, c.in(0), n)), mat<T>(with_rows(c, c.in(1), n)),
                          mat<T>(with_rows(c, c.in(2), n)), mat<T>(with_rows(c, c.out(0), n)), values(c.out(1)));
    });
  const reference::AttentionRows rows{c.batch().sequences, c.batch().sequences};
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::attention_forward<T>(shape_of(c), rows, mat<T>(with_rows(c, c.in(0), n)), mat<T>(with_rows(c, c.in(1), n)),
                                    mat<T>(with_rows(c, c.in(2), n)), mat<T>(with_rows(c, c.out(0), n)), values(c.out(1)));
  });
}
void core_backward(const OpCall& c) {
  if (!c.op().collectives.empty()) return gathered_attention_backward(c);
  const std::int64_t n = core_tokens(c);
  const reference::AttentionRows rows{c.batch().sequences, c.batch().sequences};
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::AttentionBackward<T> p;
    p.q = mat<T>(with_rows(c, c.in(0), n));
    p.k = mat<T>(with_rows(c, c.in(1), n));
    p.v = mat<T>(with_rows(c, c.in(2), n));
    p.o = mat<T>(with_rows(c, c.out(0), n));
    p.lse = values(c.out(1));
    p.d_o = mat<T>(with_rows(c, c.d_out(0), n));
    p.dq = grad<T>(with_rows(c, c.d_in(0), n));
    p.dk = grad<T>(with_rows(c, c.d_in(1), n));
    p.dv = grad<T>(with_rows(c, c.d_in(2), n));
    reference::attention_backward<T>(shape_of(c), rows, p);
  });
}

// inputs o, gate; the gate may be a strided view, one row a query group.
std::int64_t gate_rows(const OpCall& c) { return c.list().tensor(c.op().inputs[1]).rows(); }
void gate_forward(const OpCall& c) {
  const std::int64_t n = gate_rows(c);
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::sigmoid_gate_forward<T>(mat<T>(with_rows(c, c.in(0), n)), mat<T>(with_rows(c, c.in(1), n)),
                                       mat<T>(with_rows(c, c.out(0), n)));
  });
}
void gate_backward(const OpCall& c) {
  const std::int64_t n = gate_rows(c);
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::sigmoid_gate_backward<T>(mat<T>(with_rows(c, c.in(0), n)), mat<T>(with_rows(c, c.in(1), n)),
                                        mat<T>(with_rows(c, c.d_out(0), n)), grad<T>(with_rows(c, c.d_in(0), n)),
                                        grad<T>(with_rows(c, c.d_in(1), n)));
  });
}

} // namespace

std::span<const Entry> attention_ops() {
  static const Entry ops[] = {
      {model::OpKind::HeadNorm, {head_norm_forward, head_norm_backward, head_norm_scratch}},
      {model::OpKind::Rope, {rope_forward, rope_backward}},
      {model::OpKind::CoreAttention, {core_forward, core_backward, gathered_attention_scratch}},
      {model::OpKind::OutputGate, {gate_forward, gate_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
