#pragma once
#include "reference/view.h"

// RMSNorm over groups of `group` columns (the whole row, or one head at a time), and the gated norm
// of a GDN layer. Rows are read whole before they are written: dx may be the storage of dy.
namespace gdn::reference {

struct RmsNorm {
  int64 group = 0;          // columns that share one statistic and the weight; 0: the whole row
  bool zero_centred = true; // weight applied as 1 + w
  double eps = 1e-6;        // under the root
};

// x [rows, cols], weight [1, group] -> y; rstd [rows, cols / group]. Either output may be absent.
template <class T>
void rms_norm_forward(const RmsNorm& norm, In<T> x, ConstValues weight, Out<T> y, Values rstd);
// rstd absent: recomputed from x. dweight [1, group] accumulates.
template <class T>
void rms_norm_backward(const RmsNorm& norm, In<T> x, ConstValues weight, ConstValues rstd, In<T> dy,
                       Grad<T> dx, Values dweight);

// y = norm(o) * silu(z) over heads of norm.group columns (GDN: weight as is, zero_centred = false).
// `o_norm` (weight * o * rstd in the storage type, before the gate) is kept by stacks whose norm is
// an op of its own; when it is given, the product is taken from the rounded value.
template <class T>
void gated_norm_forward(const RmsNorm& norm, In<T> o, In<T> z, ConstValues weight, Out<T> y,
                        Values rstd, Out<T> o_norm = {});
template <class T>
void gated_norm_backward(const RmsNorm& norm, In<T> o, In<T> z, ConstValues weight,
                         ConstValues rstd, In<T> dy, Grad<T> d_o, Grad<T> dz, Values dweight,
                         In<T> o_norm = {});

} // namespace gdn::reference
