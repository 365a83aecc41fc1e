#include "trainer/cpu/ops.h"

#include <algorithm>

#include <fmt/core.h>

#include "reference/heads.h"
#include "reference/mlp.h"
#include "reference/norm.h"

namespace gdn::trainer::cpu {

namespace {

template <class T> void zero(const View& v) {
  for (std::int64_t i = 0; i < v.rows; ++i) std::fill_n(mat<T>(v).row(i), v.cols, T(0));
}

void view_forward(const OpCall& c) { c.use_all(); }

// Where a view of `base` lies in d:base, whose rows may be closer together than those of `base`.
View place(const OpCall& c, const model::Tensor& base, const model::Tensor& part, const View& d_base) {
  View v{d_base.data + (part.offset - base.offset) * size_of(base.dtype), base.dtype, part.rows(), part.cols(), d_base.stride};
  if (part.rows() <= 1) v.stride = part.cols();
  else if (base.row_stride == base.cols()) v.stride = part.row_stride;
  else if (part.rows() != base.rows())
    throw Error(ErrorCode::Internal, fmt::format("{}: '{}' reshapes a strided tensor", c.name(), part.name));
  return v;
}

// `cat`: the gradients of the views side by side, where the views lie in the input.
void view_backward(const OpCall& c) {
  const GradView to = c.d_in(0);
  const model::Tensor& base = c.list().tensor(c.op().inputs[0]);
  std::int64_t covered = 0;
  for (model::TensorId t : c.op().outputs) covered += c.list().tensor(t).elements();
  with_type(base.dtype, [&]<class T>() {
    if (covered < base.elements() && !to.accumulate) zero<T>(to.to);
    for (size_t i = 0; i < c.op().outputs.size(); ++i) {
      const model::Tensor& part = c.list().tensor(c.op().outputs[i]);
      const View there = place(c, base, part, to.to);
      if (const View from = c.d_out_if_any(i)) reference::copy<T>(mat<T>(from), grad<T>({there, to.accumulate}));
      else if (!to.accumulate) zero<T>(there);
    }
  });
}

// The same elements under the rows and columns of `shape`; one of the two is contiguous.
View reshaped(View v, std::int64_t rows, std::int64_t cols) {
  if (v.rows == rows && v.cols == cols) return v;
  if (v.rows * v.cols != rows * cols || (v.rows > 1 && v.stride != v.cols))
    throw Error(ErrorCode::Internal, fmt::format("a [{}, {}] operand cannot be seen as [{}, {}]", v.rows, v.cols, rows, cols));
  return {v.data, v.dtype, rows, cols, cols};
}

// x may be strided and shaped otherwise; y is contiguous.
void copy_forward(const OpCall& c) {
  const View x = c.in(0);
  with_type(x.dtype, [&]<class T>() { reference::copy<T>(mat<T>(x), mat<T>(reshaped(c.out(0), x.rows, x.cols))); });
}
void copy_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  const GradView dx = c.d_in(0);
  with_type(dy.dtype, [&]<class T>() { reference::copy<T>(mat<T>(reshaped(dy, dx.to.rows, dx.to.cols)), grad<T>(dx)); });
}

void residual_forward(const OpCall& c) {
  with_type(c.out(0).dtype, [&]<class T>() { reference::add<T>(mat<T>(c.in(0)), mat<T>(c.in(1)), mat<T>(c.out(0))); });
}

reference::RmsNorm norm_of(const OpCall& c) {
  const auto& a = c.attr<model::NormAttr>();
  return {a.group, a.zero_centred, a.eps};
}
std::int64_t norm_width(const OpCall& c) {
  const std::int64_t group = c.attr<model::NormAttr>().group;
  return group > 0 ? group : c.list().tensor(c.op().inputs[0]).cols();
}

// inputs x; outputs y, rstd.
void norm_forward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::rms_norm_forward<T>(norm_of(c), mat<T>(c.in(0)), values(c.param(0, 1, norm_width(c))), mat<T>(c.out(0)),
                                   values(c.out(1)));
  });
}
void norm_backward(const OpCall& c) {
  with_type(c.in(0).dtype, [&]<class T>() {
    reference::rms_norm_backward<T>(norm_of(c), mat<T>(c.in(0)), values(c.param(0, 1, norm_width(c))), values(c.out(1)),
                                    mat<T>(c.d_out(0)), grad<T>(c.d_in(0)), values(c.param_grad(0, 1, norm_width(c))));
  });
}

} // namespace

std::span<const Entry> plumbing_ops() {
  static const Entry ops[] = {
      {model::OpKind::View, {view_forward, view_backward}},
      {model::OpKind::Copy, {copy_forward, copy_backward}},
      {model::OpKind::ResidualAdd, {residual_forward, nullptr}},
      {model::OpKind::RmsNorm, {norm_forward, norm_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
