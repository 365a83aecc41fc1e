#include "reference/mlp.h"

#include "reference/activation.h"
#include "reference/detail.h"
#include "reference/gates.h"

namespace gdn::reference {

template <class T> void swiglu_forward(In<T> fc1, ConstValues weight, Out<T> act) {
  using A = Acc<T>;
  const int64 f = act.cols;
  expect_shape(fc1, act.rows, 2 * f, "SwiGLU input");
  expect_shape(weight, act.rows, 1, "row weight");
  for (int64 i = 0; i < act.rows; ++i) {
    const A w = weight ? static_cast<A>(weight.get(i, 0)) : A(1);
    for (int64 j = 0; j < f; ++j)
      act(i, j) = static_cast<T>(silu(up(fc1(i, j))) * up(fc1(i, f + j)) * w);
  }
}

template <class T>
void swiglu_backward(In<T> fc1, ConstValues weight, In<T> dact, Grad<T> dfc1, ValuesGrad dweight) {
  using A = Acc<T>;
  const int64 f = dact.cols;
  expect_shape(fc1, dact.rows, 2 * f, "SwiGLU input");
  expect_shape(dfc1, dact.rows, 2 * f, "SwiGLU input gradient");
  expect_shape(weight, dact.rows, 1, "row weight");
  expect_shape(dweight, dact.rows, 1, "row weight gradient");
  for (int64 i = 0; i < dact.rows; ++i) {
    const A w = weight ? static_cast<A>(weight.get(i, 0)) : A(1);
    A dw = 0;
    for (int64 j = 0; j < f; ++j) {
      const A gate = up(fc1(i, j)), value = up(fc1(i, f + j)), d = up(dact(i, j));
      dw += silu(gate) * value * d;
      if (!dfc1) continue;
      store(dfc1.to(i, j), d * w * value * silu_slope(gate), dfc1.write);
      store(dfc1.to(i, f + j), d * w * silu(gate), dfc1.write);
    }
    if (dweight) dweight.put(i, 0, static_cast<double>(dw));
  }
}

template <class T> void silu_forward(In<T> x, Out<T> y) {
  expect_shape(y, x.rows, x.cols, "SiLU output");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j) y(i, j) = static_cast<T>(silu(up(x(i, j))));
}

template <class T> void silu_backward(In<T> x, In<T> dy, Grad<T> dx) {
  expect_shape(dy, x.rows, x.cols, "SiLU output gradient");
  expect_shape(dx, x.rows, x.cols, "SiLU input gradient");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j)
      store(dx.to(i, j), up(dy(i, j)) * silu_slope(up(x(i, j))), dx.write);
}

namespace {

// y = x f(z), with slope f'.
template <class T, class F> void gate_forward(In<T> x, In<T> z, Out<T> y, F f) {
  expect_shape(z, x.rows, x.cols, "gate");
  expect_shape(y, x.rows, x.cols, "gated output");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j) y(i, j) = static_cast<T>(up(x(i, j)) * f(up(z(i, j))));
}

template <class T, class F, class S>
void gate_backward(In<T> x, In<T> z, In<T> dy, Grad<T> dx, Grad<T> dz, F f, S slope) {
  expect_shape(z, x.rows, x.cols, "gate");
  expect_shape(dy, x.rows, x.cols, "gated output gradient");
  expect_shape(dx, x.rows, x.cols, "gated input gradient");
  expect_shape(dz, x.rows, x.cols, "gate gradient");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j) {
      const Acc<T> value = up(x(i, j)), gate = up(z(i, j)), d = up(dy(i, j));
      if (dx) store(dx.to(i, j), d * f(gate), dx.write);
      if (dz) store(dz.to(i, j), d * value * slope(gate), dz.write);
    }
}

} // namespace

template <class T> void silu_gate_forward(In<T> x, In<T> z, Out<T> y) {
  gate_forward<T>(x, z, y, silu<Acc<T>>);
}

template <class T> void silu_gate_backward(In<T> x, In<T> z, In<T> dy, Grad<T> dx, Grad<T> dz) {
  gate_backward<T>(x, z, dy, dx, dz, silu<Acc<T>>, silu_slope<Acc<T>>);
}

template <class T> void sigmoid_gate_forward(In<T> x, In<T> gate, Out<T> y) {
  gate_forward<T>(x, gate, y, logistic<Acc<T>>);
}

template <class T>
void sigmoid_gate_backward(In<T> x, In<T> gate, In<T> dy, Grad<T> dx, Grad<T> dgate) {
  // 1 - sigmoid(z) as sigmoid(-z): exact in the upper tail.
  gate_backward<T>(x, gate, dy, dx, dgate, logistic<Acc<T>>,
                   [](Acc<T> z) { return logistic(z) * logistic(-z); });
}

template <class T> void row_gate_forward(In<T> x, ConstValues score, Out<T> y) {
  expect_shape(score, x.rows, 1, "row gate");
  expect_shape(y, x.rows, x.cols, "gated rows");
  for (int64 i = 0; i < x.rows; ++i) {
    const auto gate = static_cast<Acc<T>>(sigmoid(score.get(i, 0)));
    for (int64 j = 0; j < x.cols; ++j) y(i, j) = static_cast<T>(gate * up(x(i, j)));
  }
}

template <class T>
void row_gate_backward(In<T> x, ConstValues score, In<T> dy, Grad<T> dx, ValuesGrad dscore) {
  expect_shape(score, x.rows, 1, "row gate");
  expect_shape(dscore, x.rows, 1, "row gate gradient");
  expect_shape(dy, x.rows, x.cols, "gated rows gradient");
  for (int64 i = 0; i < x.rows; ++i) {
    const double s = score.get(i, 0);
    const auto gate = static_cast<Acc<T>>(sigmoid(s));
    Acc<T> dot = 0;
    for (int64 j = 0; j < x.cols; ++j) {
      const Acc<T> d = up(dy(i, j));
      dot += d * up(x(i, j));
      if (dx) store(dx.to(i, j), gate * d, dx.write);
    }
    if (dscore) dscore.put(i, 0, static_cast<double>(dot) * sigmoid(s) * sigmoid(-s));
  }
}

template <class T> void add(In<T> a, In<T> b, Out<T> y) {
  expect_shape(b, a.rows, a.cols, "second addend");
  expect_shape(y, a.rows, a.cols, "sum");
  for (int64 i = 0; i < a.rows; ++i)
    for (int64 j = 0; j < a.cols; ++j) y(i, j) = static_cast<T>(up(a(i, j)) + up(b(i, j)));
}

template <class T> void scale(double factor, In<T> x, Grad<T> y) {
  expect_shape(y, x.rows, x.cols, "scaled value");
  const auto f = static_cast<Acc<T>>(factor);
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j) store(y.to(i, j), f * up(x(i, j)), y.write);
}

void convert(ConstValues src, Values dst) {
  expect_shape(src, dst.rows, dst.cols, "conversion");
  for (int64 i = 0; i < src.rows; ++i)
    for (int64 j = 0; j < src.cols; ++j) dst.set(i, j, src.get(i, j));
}

#define GDN_MLP(T)                                                                                 \
  template void swiglu_forward<T>(In<T>, ConstValues, Out<T>);                                     \
  template void swiglu_backward<T>(In<T>, ConstValues, In<T>, Grad<T>, ValuesGrad);                \
  template void silu_forward<T>(In<T>, Out<T>);                                                    \
  template void silu_backward<T>(In<T>, In<T>, Grad<T>);                                           \
  template void silu_gate_forward<T>(In<T>, In<T>, Out<T>);                                        \
  template void silu_gate_backward<T>(In<T>, In<T>, In<T>, Grad<T>, Grad<T>);                      \
  template void sigmoid_gate_forward<T>(In<T>, In<T>, Out<T>);                                     \
  template void sigmoid_gate_backward<T>(In<T>, In<T>, In<T>, Grad<T>, Grad<T>);                   \
  template void row_gate_forward<T>(In<T>, ConstValues, Out<T>);                                   \
  template void row_gate_backward<T>(In<T>, ConstValues, In<T>, Grad<T>, ValuesGrad);              \
  template void add<T>(In<T>, In<T>, Out<T>);                                                      \
  template void scale<T>(double, In<T>, Grad<T>);
GDN_MLP(bf16)
GDN_MLP(float)
GDN_MLP(double)
#undef GDN_MLP

} // namespace gdn::reference
