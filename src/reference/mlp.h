#pragma once
#include "reference/view.h"

// Elementwise ops of the feed-forward and output-gate paths.
namespace gdn::reference {

// fc1 [rows, 2 f] = gate | up -> act [rows, f] = silu(gate) * up, times weight [rows, 1] if given
// (the routing probability folded into the expert, rounded once after the product).
template <class T> void swiglu_forward(In<T> fc1, ConstValues weight, Out<T> act);
// dweight [rows, 1] = silu(gate) * up . dact, without the weight.
template <class T>
void swiglu_backward(In<T> fc1, ConstValues weight, In<T> dact, Grad<T> dfc1, ValuesGrad dweight);

template <class T> void silu_forward(In<T> x, Out<T> y);
template <class T> void silu_backward(In<T> x, In<T> dy, Grad<T> dx);

// y = x * silu(z) and y = x * sigmoid(gate), elementwise.
template <class T> void silu_gate_forward(In<T> x, In<T> z, Out<T> y);
template <class T> void silu_gate_backward(In<T> x, In<T> z, In<T> dy, Grad<T> dx, Grad<T> dz);
template <class T> void sigmoid_gate_forward(In<T> x, In<T> gate, Out<T> y);
template <class T>
void sigmoid_gate_backward(In<T> x, In<T> gate, In<T> dy, Grad<T> dx, Grad<T> dgate);

// y = x * sigmoid(score), one score [rows, 1] a row (shared expert gate).
template <class T> void row_gate_forward(In<T> x, ConstValues score, Out<T> y);
template <class T>
void row_gate_backward(In<T> x, ConstValues score, In<T> dy, Grad<T> dx, ValuesGrad dscore);

// y = a + b (residual), rounded once. y may be the storage of a or b.
template <class T> void add(In<T> a, In<T> b, Out<T> y);
// y = factor * x, or y += factor * x.
template <class T> void scale(double factor, In<T> x, Grad<T> y);
// Between storage types.
void convert(ConstValues src, Values dst);

} // namespace gdn::reference
