#include "kernels/common/elementwise.h"
#include "kernels/common/reduce.h"
#include "trainer/cuda/collectives.h"

namespace gdn::trainer::cuda {

namespace {

// Over tensor-parallel ranks a column shard gathers its input and sums its gradient, a row shard sums its output and
// gathers that one's gradient; without sequence parallelism there are only the sums.
struct Shards {
  bool column, row, rows_divided; // rows_divided: sequence parallel
  std::int64_t tp;
  explicit Shards(const model::Op& op) {
    const auto& a = std::get<model::LinearAttr>(op.attr);
    tp = a.tp;
    column = tp > 1 && a.mode == model::TensorParallel::Column;
    row = tp > 1 && a.mode == model::TensorParallel::Row;
    rows_divided = tp > 1 && a.sequence_parallel;
  }
};

// Scratch behind cuBLAS's workspace.
LaunchContext behind_workspace(LaunchContext context) {
  take(context, kernels::kGemmWorkspace);
  return context;
}
View gathered(const OpCall& c, Engine& e, const View& mine, LaunchContext& memory) {
  Communicator& group = c.group(Group::Tp);
  const View all = take(memory, mine.dtype, mine.rows * group.size(), mine.cols);
  gather_rows(group, mine, all, e);
  return all;
}

// inputs x [rows, in]; outputs y [rows, out]; parameters W [out, in], bias [out].
void linear_forward(const OpCall& c, Engine& e) {
  const Shards s(c.op());
  const View y = c.out(0);
  const LaunchContext context = e.launch(c);
  LaunchContext memory = behind_workspace(context);
  const View x = s.column && s.rows_divided ? gathered(c, e, c.in(0), memory) : c.in(0);
  const View whole = s.row && s.rows_divided ? take(memory, y.dtype, y.rows * s.tp, y.cols) : y; // before the sum over ranks
  e.gemm.run({.a = matrix(x), .b = matrix(c.param(0, y.cols, x.cols)), .transpose_b = true, .d = matrix(whole),
              .bias = c.op().params.size() > 1 ? matrix(c.param(1, 1, y.cols)) : Matrix{}}, context);
  if (!s.row) return;
  if (s.rows_divided) scatter_sum(c.group(Group::Tp), whole, {y, false}, e);
  else reduce(c.group(Group::Tp), y);
}

// A gradient of y in fp32 beside bf16 operands: the sum of two bf16 matrices.
struct Halves {
  Matrix part[2];
  int count = 1;
  Halves(const View& dy, DType operand, LaunchContext& memory) {
    part[0] = matrix(dy);
    if (dy.dtype == operand) return;
    count = 2;
    for (Matrix& m : part) m = {take(memory, dy.rows * dy.cols * size_of(operand)), operand, dy.rows, dy.cols, dy.cols};
    kernels::split_bf16(matrix(dy), part[0], part[1], memory);
  }
};

void dgrad(const OpCall& c, Engine& e, const Shards& s, const Halves& dys, const View& dy, const LaunchContext& context, LaunchContext& memory) {
  const GradView dx = c.d_in(0);
  if (!dx) return;
  GradView to = dx;
  if (s.column && s.rows_divided) to = {take(memory, dx.to.dtype, dx.to.rows * s.tp, dx.to.cols), false};
  else if (LaunchContext own = ranks_memory(c, e); s.column) to = {take(own, dx.to.dtype, dx.to.rows, dx.to.cols), false};
  for (int i = 0; i < dys.count; ++i)
    e.gemm.run({.a = dys.part[i], .b = matrix(c.param(0, dy.cols, dx.to.cols)), .d = matrix(to.to), .accumulate = to.accumulate || i > 0}, context);
  if (!s.column) return;
  if (s.rows_divided) return scatter_sum(c.group(Group::Tp), to.to, dx, e);
  reduce(c.group(Group::Tp), to.to);
  copy(to.to, dx, e);
}

void wgrad(const OpCall& c, Engine& e, const Shards& s, const Halves& dys, const View& dy, const LaunchContext& context, LaunchContext& memory) {
  for (int p : c.backward_step().param_grads) {
    if (p == 0) {
      const View x = s.column && s.rows_divided ? gathered(c, e, c.in(0), memory) : c.in(0), dw = c.param_grad(0, dy.cols, x.cols);
      for (int i = 0; i < dys.count && dw; ++i)
        e.gemm.run({.a = dys.part[i], .b = matrix(x), .transpose_a = true, .d = matrix(dw), .accumulate = true}, context);
    } else if (const View db = c.param_grad(1, 1, dy.cols)) {
      kernels::column_sums(matrix(dy), {}, data<float>(db), context);
    }
  }
}

void linear_backward(const OpCall& c, Engine& e) {
  const Shards s(c.op());
  const LaunchContext context = e.launch(c);
  LaunchContext memory = behind_workspace(context);
  const View dy = s.row && s.rows_divided ? gathered(c, e, c.d_out(0), memory) : c.d_out(0);
  const Halves dys(dy, c.list().tensor(c.op().inputs[0]).dtype, memory);
  if (!c.backward_step().grad_writes.empty()) dgrad(c, e, s, dys, dy, context, memory);
  if (!c.backward_step().param_grads.empty()) wgrad(c, e, s, dys, dy, context, memory);
}

} // namespace

std::span<const Entry> linear_ops() {
  static const Entry ops[] = {
      {model::OpKind::Linear, {linear_forward, linear_backward}},
      {model::OpKind::LmHead, {linear_forward, linear_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
