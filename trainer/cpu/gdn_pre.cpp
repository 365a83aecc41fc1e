#include "reference/conv.h"
#include "reference/gates.h"
#include "reference/heads.h"
#include "reference/l2norm.h"
#include "trainer/cpu/ops.h"

// The fused front end of a GDN layer, by its definition: conv + SiLU, L2 norm of q and k, gates.
namespace gdn::trainer::cpu {

using model::GdnAttr;
using reference::Activation;

namespace {

// Columns of qkv: q | k | v.
struct Parts {
  std::int64_t rows, q, v, channels;
  Parts(const model::OpList& list, const model::Op& op) {
    const auto& a = std::get<GdnAttr>(op.attr);
    rows = list.tensor(op.inputs[0]).rows();
    q = a.key_heads * a.key_dim;
    v = a.value_heads * a.value_dim;
    channels = 2 * q + v;
  }
};

// q|k after the convolution; backward also their norms, statistics and gradient.
Bytes pre_scratch(const model::OpList& list, const model::Op& op, int step) {
  const Parts p(list, op);
  const Bytes qk = round_up(p.rows * 2 * p.q * size_of(list.tensor(op.inputs[0]).dtype), 256);
  return step < 0 ? qk : 3 * qk + p.rows * 2 * std::get<GdnAttr>(op.attr).key_heads * 4;
}

struct Scratch {
  View conv, norm, gradient, rstd;
  Scratch(const OpCall& c, DType dtype) {
    const Parts p(c.list(), c.op());
    const Bytes qk = round_up(p.rows * 2 * p.q * size_of(dtype), 256);
    const std::int64_t heads = 2 * c.attr<GdnAttr>().key_heads;
    std::byte* at = c.scratch(pre_scratch(c.list(), c.op(), c.step())).data();
    conv = {at, dtype, p.rows, 2 * p.q, 2 * p.q};
    if (c.step() < 0) return;
    norm = gradient = conv;
    norm.data += qk;
    gradient.data += 2 * qk;
    rstd = {at + 3 * qk, DType::FP32, p.rows, heads, heads};
  }
};

View columns(View v, std::int64_t first, std::int64_t count) {
  if (!v) return v;
  v.data += first * size_of(v.dtype);
  v.cols = count;
  return v;
}
View channels(View v, std::int64_t first, std::int64_t count) { // rows of a weight, or entries of a bias
  if (!v) return v;
  v.data += first * v.stride * size_of(v.dtype);
  v.rows = count;
  return v;
}

// inputs qkv, beta logits, alpha; outputs q, k, v, g, beta; parameters conv, A_log, dt_bias(, conv bias).
void pre_forward(const OpCall& c) {
  const auto& a = c.attr<GdnAttr>();
  const Parts p(c.list(), c.op());
  const View x = c.in(0), weight = c.param(0, p.channels, a.kernel), bias = a.conv_bias ? c.param(3, 1, p.channels) : View{};
  const Scratch s(c, x.dtype);
  with_type(x.dtype, [&]<class T>() {
    auto convolve = [&](std::int64_t first, std::int64_t count, const View& to) {
      reference::conv_forward<T>(Activation::Silu, c.batch().sequences, mat<T>(columns(x, first, count)),
                                 values(channels(weight, first, count)), values(columns(bias, first, count)), mat<T>(to));
    };
    convolve(0, 2 * p.q, s.conv);
    convolve(2 * p.q, p.v, c.out(2));
    for (int i : {0, 1}) {
      const Mat<T> from = mat<T>(columns(s.conv, i * p.q, p.q)), to = mat<T>(c.out(static_cast<size_t>(i)));
      if (a.normalise) reference::l2norm_forward<T>(a.key_dim, from, to, {});
      else reference::copy<T>(from, to);
    }
  });
  reference::gates_forward(values(c.in(2)), values(c.in(1)), values(c.param(1, 1, a.value_heads)),
                           values(c.param(2, 1, a.value_heads)), a.negative_eigenvalues, values(c.out(3)), values(c.out(4)));
}

void pre_backward(const OpCall& c) {
  const auto& a = c.attr<GdnAttr>();
  const Parts p(c.list(), c.op());
  const View x = c.in(0), weight = c.param(0, p.channels, a.kernel), bias = a.conv_bias ? c.param(3, 1, p.channels) : View{};
  const View dweight = c.param_grad(0, p.channels, a.kernel), dbias = a.conv_bias ? c.param_grad(3, 1, p.channels) : View{};
  const GradView dx = c.d_in(0);
  const Scratch s(c, x.dtype);
  with_type(x.dtype, [&]<class T>() {
    reference::conv_forward<T>(Activation::Silu, c.batch().sequences, mat<T>(columns(x, 0, 2 * p.q)),
                               values(channels(weight, 0, 2 * p.q)), values(columns(bias, 0, 2 * p.q)), mat<T>(s.conv));
    if (a.normalise) reference::l2norm_forward<T>(a.key_dim, mat<T>(s.conv), mat<T>(s.norm), values(s.rstd));
    for (int i : {0, 1}) {
      const View dy = c.d_out(static_cast<size_t>(i)), to = columns(s.gradient, i * p.q, p.q);
      const std::int64_t heads = a.key_heads;
      if (a.normalise)
        reference::l2norm_backward<T>(a.key_dim, mat<T>(columns(s.norm, i * p.q, p.q)), values(columns(s.rstd, i * heads, heads)),
                                      mat<T>(dy), mat<T>(to));
      else
        reference::copy<T>(mat<T>(dy), mat<T>(to));
    }
    auto convolve = [&](std::int64_t first, std::int64_t count, const View& dy) {
      GradView to = dx;
      to.to = columns(to.to, first, count);
      reference::conv_backward<T>(Activation::Silu, c.batch().sequences, mat<T>(columns(x, first, count)),
                                  values(channels(weight, first, count)), values(columns(bias, first, count)), mat<T>(dy),
                                  grad<T>(to), values(channels(dweight, first, count)), values(columns(dbias, first, count)));
    };
    convolve(0, 2 * p.q, s.gradient);
    convolve(2 * p.q, p.v, c.d_out(2));
  });
  reference::GatesBackward g;
  g.b = values(c.in(1));
  g.alpha = values(c.in(2));
  g.a_log = values(c.param(1, 1, a.value_heads));
  g.dt_bias = values(c.param(2, 1, a.value_heads));
  g.dg = values(c.d_out(3));
  g.dbeta = values(c.d_out(4));
  g.db = values_grad(c.d_in(1));
  g.dalpha = values_grad(c.d_in(2));
  g.da_log = values(c.param_grad(1, 1, a.value_heads));
  g.ddt_bias = values(c.param_grad(2, 1, a.value_heads));
  reference::gates_backward(g, a.negative_eigenvalues);
}

const Entry kOps[] = {{model::OpKind::GdnPre, {pre_forward, pre_backward, pre_scratch}}};

} // namespace

std::span<const Entry> gdn_pre_ops() { return kOps; }

} // namespace gdn::trainer::cpu
