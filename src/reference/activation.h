#pragma once
#include <cmath>

// Scalar activations in the arithmetic type. All are finite for every finite input: exp(-x) may
// overflow to infinity, whose reciprocal is the right limit 0.
namespace gdn::reference {

template <class A> A logistic(A x) { return 1 / (1 + std::exp(-x)); }
template <class A> A silu(A x) { return x / (1 + std::exp(-x)); }
template <class A> A silu_slope(A x) {
  const A s = logistic(x);
  return s * (1 + x * (1 - s));
}

} // namespace gdn::reference
