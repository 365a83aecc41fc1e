#pragma once
#include "reference/sequences.h"
#include "reference/view.h"

// y = x W^T + b and its three gradients. Products are Eigen's on zero-padded tiles of fixed size,
// so a row's result does not depend on how many rows there are, nor on where they lie in memory.
//
// T is the storage type of x and W, O that of y and dy: T, or Acc<T> (router logits in fp32).
namespace gdn::reference {

// x [rows, in], w [out, in], bias [1, out] or absent -> y [rows, out].
template <class T, class O = T> void linear_forward(In<T> x, In<T> w, ConstValues bias, Out<O> y);
// dx [rows, in] = dy W.
template <class T, class O = T> void linear_dgrad(In<O> dy, In<T> w, Grad<T> dx);
// dw [out, in] += dy^T x.
template <class T, class O = T> void linear_wgrad(In<O> dy, In<T> x, Out<Acc<T>> dw);
// db [1, out] += sum over rows of dy.
template <class O> void bias_grad(In<O> dy, Values db);

// One matrix per group of rows: rows groups[e] .. groups[e+1] use w.row_range(e * out, out). Groups
// may be empty; rows past the last group are written as zeros (forward, dgrad).
template <class T> void grouped_linear_forward(In<T> x, In<T> w, Sequences groups, Out<T> y);
template <class T> void grouped_linear_dgrad(In<T> dy, In<T> w, Sequences groups, Grad<T> dx);
template <class T> void grouped_linear_wgrad(In<T> dy, In<T> x, Sequences groups, Out<Acc<T>> dw);

} // namespace gdn::reference
