#include <cstring>

#include "reference/gates.h"
#include "reference/gdn2.h"
#include "reference/heads.h"
#include "trainer/cpu/ops.h"

namespace gdn::trainer::cpu {

using model::GdnAttr;

namespace {

// Raw sections at Hk heads; the gates of q and k channels are repeated to Hv.
struct Widths {
  std::int64_t rows, keys, dk, repeat; // keys = Hk dk
  Widths(const model::OpList& list, const model::Op& op) {
    const auto& a = std::get<GdnAttr>(op.attr);
    const model::Tensor& f = list.tensor(op.inputs[0]);
    rows = f.rows();
    keys = f.cols();
    dk = a.key_dim;
    repeat = a.value_heads * dk / keys;
  }
};
Bytes gates_scratch(const model::OpList& list, const model::Op& op, int) {
  const Widths w(list, op);
  return 2 * w.rows * w.keys * 4; // one gate at Hk heads, fp32; the other in the storage type
}
View scratch_view(const OpCall& c, int which, DType dtype) {
  const Widths w(c.list(), c.op());
  std::byte* at = c.scratch(gates_scratch(c.list(), c.op(), c.step())).data() + which * w.rows * w.keys * 4;
  return {at, dtype, w.rows, w.keys, w.keys};
}

// inputs f, b [R, Hk dk], w [R, Hv dv]; outputs g fp32, b [R, Hv dk], w; parameters A_log [Hk], dt_bias [Hk dk].
void gates_forward(const OpCall& c) {
  const Widths s(c.list(), c.op());
  const View f = c.in(0), decay = scratch_view(c, 0, DType::FP32), erase = scratch_view(c, 1, f.dtype);
  reference::decay_forward(s.dk, values(f), values(c.param(0, 1, s.keys / s.dk)), values(c.param(1, 1, s.keys)), values(decay));
  reference::repeat_heads_forward<float>(s.dk, s.repeat, mat<float>(decay), mat<float>(c.out(0)));
  reference::sigmoid_forward(values(c.in(1)), values(erase));
  with_type(f.dtype, [&]<class T>() { reference::repeat_heads_forward<T>(s.dk, s.repeat, mat<T>(erase), mat<T>(c.out(1))); });
  reference::sigmoid_forward(values(c.in(2)), values(c.out(2)));
}
void gates_backward(const OpCall& c) {
  const Widths s(c.list(), c.op());
  const View f = c.in(0), decay = scratch_view(c, 0, DType::FP32), erase = scratch_view(c, 1, f.dtype);
  reference::repeat_heads_backward<float>(s.dk, s.repeat, mat<float>(c.d_out(0)), mat<float>(decay));
  reference::decay_backward(s.dk, values(f), values(c.param(0, 1, s.keys / s.dk)), values(c.param(1, 1, s.keys)), values(decay),
                            values_grad(c.d_in(0)), values(c.param_grad(0, 1, s.keys / s.dk)), values(c.param_grad(1, 1, s.keys)));
  with_type(f.dtype, [&]<class T>() { reference::repeat_heads_backward<T>(s.dk, s.repeat, mat<T>(c.d_out(1)), mat<T>(erase)); });
  reference::sigmoid_backward(values(c.in(1)), values(erase), values_grad(c.d_in(1)));
  reference::sigmoid_backward(values(c.in(2)), values(c.d_out(2)), values_grad(c.d_in(2)));
}

reference::RuleShape shape_of(const OpCall& c) {
  const auto& a = c.attr<GdnAttr>();
  reference::RuleShape s;
  s.key_heads = c.list().tensor(c.op().inputs[0]).cols() / a.key_dim;
  s.value_heads = a.value_heads;
  s.key_dim = a.key_dim;
  s.value_dim = a.value_dim;
  return s;
}

// inputs q, k, v, g, b, w; outputs o, g_cum, A, A_qk. The two 64-wide matrices are what the upstream
// kernel keeps; the recurrence here does without them, so they hold zeros.
void rule_forward(const OpCall& c) {
  for (size_t i : {2u, 3u})
    std::memset(c.out(i).data, 0, static_cast<size_t>(c.list().tensor(c.op().outputs[i]).bytes()));
  with_type(c.in(2).dtype, [&]<class T>() {
    reference::Gdn2Forward<T> p;
    p.q = mat<T>(c.in(0));
    p.k = mat<T>(c.in(1));
    p.v = mat<T>(c.in(2));
    p.g = values(c.in(3));
    p.b = mat<T>(c.in(4));
    p.w = mat<T>(c.in(5));
    p.o = mat<T>(c.out(0));
    p.g_cum = values(c.out(1));
    reference::gdn2_forward<T>(shape_of(c), c.batch().sequences, p);
  });
}
void rule_backward(const OpCall& c) {
  for (size_t i : {1u, 2u, 3u}) c.out(i); // kept, not needed
  with_type(c.in(2).dtype, [&]<class T>() {
    reference::Gdn2Backward<T> p;
    p.q = mat<T>(c.in(0));
    p.k = mat<T>(c.in(1));
    p.v = mat<T>(c.in(2));
    p.g = values(c.in(3));
    p.b = mat<T>(c.in(4));
    p.w = mat<T>(c.in(5));
    p.d_o = mat<T>(c.d_out(0));
    p.dq = grad<T>(c.d_in(0));
    p.dk = grad<T>(c.d_in(1));
    p.dv = grad<T>(c.d_in(2));
    p.dg = values_grad(c.d_in(3));
    p.db = grad<T>(c.d_in(4));
    p.dw = grad<T>(c.d_in(5));
    reference::gdn2_backward<T>(shape_of(c), c.batch().sequences, p);
  });
}

const Entry kOps[] = {
    {model::OpKind::Gdn2Gates, {gates_forward, gates_backward, gates_scratch}},
    {model::OpKind::Gdn2Rule, {rule_forward, rule_backward}},
};

} // namespace

std::span<const Entry> gdn2_ops() { return kOps; }

} // namespace gdn::trainer::cpu
