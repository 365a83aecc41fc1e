#include "kernels/common/elementwise.h"
#include "kernels/common/reduce.h"
#include "trainer/cuda/ops.h"

namespace gdn::trainer::cuda {

namespace {

// inputs x [rows, in]; outputs y [rows, out]; parameters W [out, in], bias [out].
void linear_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), y = c.out(0);
  e.gemm.run({.a = matrix(x), .b = matrix(c.param(0, y.cols, x.cols)), .transpose_b = true, .d = matrix(y),
              .bias = c.op().params.size() > 1 ? matrix(c.param(1, 1, y.cols)) : Matrix{}}, e.launch(c));
}

// A gradient of y in fp32 beside bf16 operands: the sum of two bf16 matrices behind the workspace.
struct Halves {
  Matrix part[2];
  int count = 1;
  Halves(const View& dy, DType operand, LaunchContext& context) {
    part[0] = matrix(dy);
    if (dy.dtype == operand) return;
    count = 2;
    LaunchContext behind = context;
    take(behind, kernels::kGemmWorkspace);
    for (Matrix& m : part) m = {take(behind, dy.rows * dy.cols * size_of(operand)), operand, dy.rows, dy.cols, dy.cols};
    kernels::split_bf16(matrix(dy), part[0], part[1], context);
  }
};

void linear_backward(const OpCall& c, Engine& e) {
  const View dy = c.d_out(0);
  const model::Tensor& x = c.list().tensor(c.op().inputs[0]);
  LaunchContext context = e.launch(c);
  const Halves dys(dy, x.dtype, context);
  if (!c.backward_step().grad_writes.empty())
    if (GradView dx = c.d_in(0))
      for (int i = 0; i < dys.count; ++i)
        e.gemm.run({.a = dys.part[i], .b = matrix(c.param(0, dy.cols, x.cols())), .d = matrix(dx.to), .accumulate = dx.accumulate || i > 0}, context);
  for (int p : c.backward_step().param_grads) {
    if (p == 0) {
      const View from = c.in(0), dw = c.param_grad(0, dy.cols, x.cols());
      for (int i = 0; i < dys.count && dw; ++i)
        e.gemm.run({.a = dys.part[i], .b = matrix(from), .transpose_a = true, .d = matrix(dw), .accumulate = true}, context);
    } else if (const View db = c.param_grad(1, 1, dy.cols)) {
      kernels::column_sums(matrix(dy), {}, data<float>(db), context);
    }
  }
}

const Entry kOps[] = {
    {model::OpKind::Linear, {linear_forward, linear_backward}},
    {model::OpKind::LmHead, {linear_forward, linear_backward}},
};

} // namespace

std::span<const Entry> linear_ops() { return kOps; }

} // namespace gdn::trainer::cuda
