#pragma once
#include <cmath>

#include "reference/view.h"

// One row of the L2 norm, shared by the op of its own and by the rule that normalises inside.
namespace gdn::reference {

// to = x rstd, rounded to the storage type T (so that both places give the same bits); returns
// rstd.
template <class T> Acc<T> l2_normalise(const T* x, int64 n, double eps, Acc<T>* to) {
  using A = Acc<T>;
  A sum = 0;
  for (int64 j = 0; j < n; ++j) sum += static_cast<A>(x[j]) * static_cast<A>(x[j]);
  const A rstd = 1 / std::sqrt(sum + static_cast<A>(eps));
  for (int64 j = 0; j < n; ++j) to[j] = static_cast<A>(static_cast<T>(static_cast<A>(x[j]) * rstd));
  return rstd;
}

// y is the normalised row; d goes in as the gradient of y and comes out as that of x.
template <class A> void l2_input_gradient(const A* y, A rstd, int64 n, A* d) {
  A dot = 0;
  for (int64 j = 0; j < n; ++j) dot += d[j] * y[j];
  for (int64 j = 0; j < n; ++j) d[j] = rstd * (d[j] - dot * y[j]);
}

} // namespace gdn::reference
