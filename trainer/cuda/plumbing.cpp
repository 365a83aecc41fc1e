#include <fmt/core.h>

#include "kernels/common/elementwise.h"
#include "kernels/norm/head_norm.h"
#include "trainer/cuda/ops.h"

namespace gdn::trainer::cuda {

namespace {

void view_forward(const OpCall& c, Engine&) { c.use_all(); }

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
void view_backward(const OpCall& c, Engine& e) {
  const GradView to = c.d_in(0);
  const model::Tensor& base = c.list().tensor(c.op().inputs[0]);
  std::int64_t covered = 0;
  for (model::TensorId t : c.op().outputs) covered += c.list().tensor(t).elements();
  if (covered < base.elements() && !to.accumulate) kernels::fill({matrix(to.to), false}, 0, e.launch());
  for (size_t i = 0; i < c.op().outputs.size(); ++i) {
    const View there = place(c, base, c.list().tensor(c.op().outputs[i]), to.to);
    if (const View from = c.d_out_if_any(i)) kernels::copy(matrix(from), {matrix(there), to.accumulate}, e.launch());
    else if (!to.accumulate) kernels::fill({matrix(there), false}, 0, e.launch());
  }
}

// The same elements under the rows and columns of another matrix; one of the two is contiguous.
View reshaped(const OpCall& c, View v, std::int64_t rows, std::int64_t cols) {
  if (v.rows == rows && v.cols == cols) return v;
  if (v.rows * v.cols != rows * cols || (v.rows > 1 && v.stride != v.cols))
    throw Error(ErrorCode::Internal, fmt::format("{}: a [{}, {}] operand cannot be seen as [{}, {}]", c.name(), v.rows, v.cols, rows, cols));
  return {v.data, v.dtype, rows, cols, cols};
}

// x may be strided and shaped otherwise; y is contiguous.
void copy_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0);
  kernels::copy(matrix(x), {matrix(reshaped(c, c.out(0), x.rows, x.cols)), false}, e.launch());
}
void copy_backward(const OpCall& c, Engine& e) {
  const GradView dx = c.d_in(0);
  kernels::copy(matrix(reshaped(c, c.d_out(0), dx.to.rows, dx.to.cols)), gradient(dx), e.launch());
}

void residual_forward(const OpCall& c, Engine& e) {
  kernels::add(matrix(c.in(0)), matrix(c.in(1)), matrix(c.out(0)), e.launch());
}

// inputs x; outputs y, rstd.
kernels::HeadNorm norm_of(const OpCall& c) {
  const auto& a = c.attr<model::NormAttr>();
  const model::Tensor& x = c.list().tensor(c.op().inputs[0]);
  const std::int64_t width = a.group > 0 ? a.group : x.cols();
  kernels::HeadNorm n;
  n.units = x.elements() / width;
  n.dim = static_cast<int>(width);
  n.zero_centred = a.zero_centred;
  n.weight = matrix(c.param(0, 1, width));
  n.eps = static_cast<float>(a.eps);
  return n;
}
void norm_forward(const OpCall& c, Engine& e) {
  kernels::head_norm_forward(norm_of(c), matrix(c.in(0)), matrix(c.out(0)), data<float>(c.out(1)), e.launch());
}
void norm_backward(const OpCall& c, Engine& e) {
  const kernels::HeadNorm n = norm_of(c);
  kernels::head_norm_backward(n, {.x = matrix(c.in(0)), .rstd = data<float>(c.out(1)), .dy = matrix(c.d_out(0)), .dx = gradient(c.d_in(0)),
                                  .d_weight = data<float>(c.param_grad(0, 1, n.dim))}, e.launch(c));
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

} // namespace gdn::trainer::cuda
