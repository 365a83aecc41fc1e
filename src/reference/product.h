#pragma once
#include "reference/detail.h"

// Matrix product on tiles of a fixed size, padded with zeros. Every element of the result is
// computed by the same code on the same tile shape wherever it lies, so it does not depend on the
// number of rows, on the alignment of the operands or on threads; Eigen alone promises none of
// these.
namespace gdn::reference {

// c [m, n] += factor * a [m, k] b [k, n], all contiguous: Eigen's product, compiled here only.
template <class A>
void tile_product(int64 m, int64 n, int64 k, A factor, const A* a, const A* b, A* c);

// Element (i, j) of an operand is data[i * row + j * col].
template <class T> struct Strided {
  const T* data;
  int64 row, col;
};
template <class T> Strided<T> plain(const Mat<const T>& m) { return {m.data, m.stride, 1}; }
template <class T> Strided<T> transposed(const Mat<const T>& m) { return {m.data, 1, m.stride}; }

// out [m, n] = a [m, k] b [k, n] (+ bias [n], may be null), in the arithmetic type of `O`, rounded
// once. With k = 0 the product is zero.
template <class O, class TA, class TB>
void product(int64 m, int64 n, int64 k, Strided<TA> a, Strided<TB> b, const Acc<O>* bias,
             Mat<O> out, Write write);

} // namespace gdn::reference
