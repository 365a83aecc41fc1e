#pragma once
#include "reference/view.h"

// L2 norm over groups of `group` columns (heads): y = x * rstd, rstd = (|x|^2 + eps)^(-1/2).
namespace gdn::reference {

inline constexpr double kL2NormEps = 1e-6; // as in FLA's l2norm

// x [rows, cols] -> y; rstd [rows, cols / group], either may be absent.
template <class T> void l2norm_forward(int64 group, In<T> x, Out<T> y, Values rstd);
// dx = rstd (dy - (dy.y) y), from the stored output y and rstd.
template <class T>
void l2norm_backward(int64 group, In<T> y, ConstValues rstd, In<T> dy, Grad<T> dx);

} // namespace gdn::reference
