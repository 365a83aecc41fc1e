#include <cstring>

#include "reference/gates.h"
#include "reference/gdn2.h"
#include "reference/heads.h"
#include "trainer/cpu/context.h"
#include "trainer/cpu/ops.h"
#include "trainer/cpu/states.h"

namespace gdn::trainer::cpu {

using model::GdnAttr;

namespace {

// Raw sections at Hk heads; the gates of key channels are repeated to Hv unless the op is grouped.
struct Widths {
  std::int64_t rows, keys, dk, repeat; // keys = Hk dk
  DType gate;                          // of g
  Widths(const model::OpList& list, const model::Op& op) {
    const model::Tensor& f = list.tensor(op.inputs[0]);
    gate = list.tensor(op.outputs[0]).dtype;
    rows = f.rows();
    keys = f.cols();
    dk = std::get<GdnAttr>(op.attr).key_dim;
    repeat = list.tensor(op.outputs[0]).cols() / keys;
  }
};
// One gate at Hk heads, and one in the storage type; then this rank's part of A_log and dt_bias.
Bytes narrow_bytes(const Widths& w) { return round_up(2 * w.rows * w.keys * size_of(w.gate), 8); }
Bytes gates_scratch(const model::OpList& list, const model::Op& op, int step) {
  const Widths w(list, op);
  return narrow_bytes(w) + HeadSlice::scratch_bytes(op, 0, w.keys / w.dk, 1, step) + HeadSlice::scratch_bytes(op, 1, w.keys, 1, step);
}
struct GateMemory {
  std::span<std::byte> narrow, rest;
  View decay, erase;
  HeadSlice a_log, dt_bias;
  GateMemory(const OpCall& c, const Widths& w)
      : narrow(c.scratch(gates_scratch(c.list(), c.op(), c.step()))), rest(narrow.subspan(static_cast<size_t>(narrow_bytes(w)))),
        decay{narrow.data(), w.gate, w.rows, w.keys, w.keys},
        erase{narrow.data() + w.rows * w.keys * size_of(w.gate), c.list().tensor(c.op().inputs[0]).dtype, w.rows, w.keys, w.keys},
        a_log(c, 0, {w.keys / w.dk}, 1, rest), dt_bias(c, 1, {w.keys}, 1, rest) {}
};
// inputs f, b [R, Hk dk], w [R, Hv dv]; outputs g fp32, b [R, Hv dk], w; parameters A_log [Hk], dt_bias [Hk dk].
void gdn2_gates_forward(const OpCall& c) {
  const Widths s(c.list(), c.op());
  const View f = c.in(0);
  const GateMemory m(c, s);
  reference::decay_forward(s.dk, values(f), values(as_row(m.a_log.value())), values(as_row(m.dt_bias.value())), values(m.decay));
  with_type(s.gate, [&]<class T>() { reference::repeat_heads_forward<T>(s.dk, s.repeat, mat<T>(m.decay), mat<T>(c.out(0))); });
  reference::sigmoid_forward(values(c.in(1)), values(m.erase));
  with_type(f.dtype, [&]<class T>() { reference::repeat_heads_forward<T>(s.dk, s.repeat, mat<T>(m.erase), mat<T>(c.out(1))); });
  reference::sigmoid_forward(values(c.in(2)), values(c.out(2)));
}
void gdn2_gates_backward(const OpCall& c) {
  const Widths s(c.list(), c.op());
  const View f = c.in(0);
  GateMemory m(c, s);
  with_type(s.gate, [&]<class T>() { reference::repeat_heads_backward<T>(s.dk, s.repeat, mat<T>(c.d_out(0)), mat<T>(m.decay)); });
  reference::decay_backward(s.dk, values(f), values(as_row(m.a_log.value())), values(as_row(m.dt_bias.value())), values(m.decay),
                            values_grad(c.d_in(0)), values(as_row(m.a_log.gradient())), values(as_row(m.dt_bias.gradient())));
  m.a_log.finish();
  m.dt_bias.finish();
  with_type(f.dtype, [&]<class T>() { reference::repeat_heads_backward<T>(s.dk, s.repeat, mat<T>(c.d_out(1)), mat<T>(m.erase)); });
  reference::sigmoid_backward(values(c.in(1)), values(m.erase), values_grad(c.d_in(1)));
  reference::sigmoid_backward(values(c.in(2)), values(c.d_out(2)), values_grad(c.d_in(2)));
}

// inputs q, k, v, g, b, w; outputs o, g_cum (not when grouped), A, A_qk. When grouped, g and b enter at
// Hk heads and are repeated here; backward repeats them again and sums their gradients.
struct RuleParts {
  reference::RuleShape shape;
  std::int64_t rows, wide, repeat; // wide = Hv dk
  bool grouped;
  DType gate; // of g
  RuleParts(const model::OpList& list, const model::Op& op) {
    const auto& a = std::get<GdnAttr>(op.attr);
    shape.key_heads = list.tensor(op.inputs[0]).cols() / a.key_dim;
    shape.value_heads = a.value_heads;
    shape.key_dim = a.key_dim;
    shape.value_dim = a.value_dim;
    rows = list.tensor(op.inputs[0]).rows();
    wide = a.value_heads * a.key_dim;
    repeat = wide / list.tensor(op.inputs[3]).cols();
    grouped = a.grouped;
    gate = list.tensor(op.inputs[3]).dtype;
  }
};
Bytes gdn2_rule_scratch(const model::OpList& list, const model::Op& op, int step) {
  const RuleParts p(list, op);
  return p.repeat == 1 ? 0 : p.rows * p.wide * 2 * size_of(p.gate) * (step < 0 ? 1 : 2); // g and b, their gradients
}

struct WideGates {
  View g, b, dg, db;
  WideGates(const OpCall& c, const RuleParts& p) : g(c.in(3)), b(c.in(4)) {
    if (c.step() >= 0) {
      dg = c.d_in(3).to;
      db = c.d_in(4).to;
    }
    if (p.repeat == 1) return;
    std::byte* at = c.scratch(gdn2_rule_scratch(c.list(), c.op(), c.step())).data();
    auto take = [&](DType dtype) {
      View v{at, dtype, p.rows, p.wide, p.wide};
      at += p.rows * p.wide * size_of(p.gate);
      return v;
    };
    const View narrow_g = g, narrow_b = b;
    g = take(p.gate);
    b = take(narrow_b.dtype);
    with_type(p.gate, [&]<class T>() { reference::repeat_heads_forward<T>(p.shape.key_dim, p.repeat, mat<T>(narrow_g), mat<T>(g)); });
    with_type(b.dtype, [&]<class T>() { reference::repeat_heads_forward<T>(p.shape.key_dim, p.repeat, mat<T>(narrow_b), mat<T>(b)); });
    if (c.step() < 0) return;
    dg = take(p.gate);
    db = take(b.dtype);
  }
};

// The two 64-wide matrices are what the kernels keep; the recurrence here does without them, so they
// hold zeros.
void gdn2_rule_forward(const OpCall& c) {
  const RuleParts parts(c.list(), c.op());
  const WideGates gates(c, parts);
  const size_t first = parts.grouped ? 1 : 2; // A, A_qk
  for (size_t i : {first, first + 1})
    std::memset(c.out(i).data, 0, static_cast<size_t>(c.list().tensor(c.op().outputs[i]).bytes()));
  with_type(c.in(2).dtype, [&]<class T>() {
    reference::Gdn2Forward<T> p;
    p.q = mat<T>(c.in(0));
    p.k = mat<T>(c.in(1));
    p.v = mat<T>(c.in(2));
    p.g = values(gates.g);
    p.b = mat<T>(gates.b);
    p.w = mat<T>(c.in(5));
    p.o = mat<T>(c.out(0));
    if (!parts.grouped) p.g_cum = values(c.out(1));
    if (c.batch().states) return gdn2_states<T>(*c.batch().states, parts.shape, c.batch().sequences, p);
    reference::gdn2_forward<T>(parts.shape, c.batch().sequences, p);
  });
}
void gdn2_rule_backward(const OpCall& c) {
  const RuleParts parts(c.list(), c.op());
  const WideGates gates(c, parts);
  for (size_t i = 1; i < c.op().outputs.size(); ++i) c.out(i); // kept by the kernels, not needed here
  const GradView dg = c.d_in(3), db = c.d_in(4);
  const bool repeated = parts.repeat > 1;
  with_type(c.in(2).dtype, [&]<class T>() {
    reference::Gdn2Backward<T> p;
    p.q = mat<T>(c.in(0));
    p.k = mat<T>(c.in(1));
    p.v = mat<T>(c.in(2));
    p.g = values(gates.g);
    p.b = mat<T>(gates.b);
    p.w = mat<T>(c.in(5));
    p.d_o = mat<T>(c.d_out(0));
    p.dq = grad<T>(c.d_in(0));
    p.dk = grad<T>(c.d_in(1));
    p.dv = grad<T>(c.d_in(2));
    p.dg = values_grad({gates.dg, !repeated && dg.accumulate});
    p.db = grad<T>({gates.db, !repeated && db.accumulate});
    p.dw = grad<T>(c.d_in(5));
    reference::gdn2_backward<T>(parts.shape, c.batch().sequences, p);
    if (!repeated) return;
    using A = Acc<T>; // of g
    reference::repeat_heads_backward<A>(parts.shape.key_dim, parts.repeat, mat<A>(gates.dg), grad<A>(dg));
    reference::repeat_heads_backward<T>(parts.shape.key_dim, parts.repeat, mat<T>(gates.db), grad<T>(db));
  });
}

} // namespace

std::span<const Entry> gdn2_ops() {
  static const Entry ops[] = {
      {model::OpKind::Gdn2Gates, {gdn2_gates_forward, gdn2_gates_backward, gates_scratch}},
      {model::OpKind::Gdn2Rule, {gdn2_rule_forward, gdn2_rule_backward, gdn2_rule_scratch}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
