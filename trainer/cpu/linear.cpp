#include <fmt/core.h>

#include "reference/linear.h"
#include "trainer/cpu/collectives.h"

// Linears, plain and over tensor-parallel ranks: a column shard gathers its input and sums its gradient, a
// row shard sums its output and gathers that one's gradient; without sequence parallelism there are only
// the sums.
namespace gdn::trainer::cpu {

using model::LinearAttr;
using model::TensorParallel;

namespace {

// x and W in T, y in O: router logits may be fp32 over a bf16 input.
template <class F> void with_linear_types(DType x, DType y, F&& f) {
  if (x == y) with_type(x, [&]<class T>() { f.template operator()<T, T>(); });
  else if (x == DType::BF16 && y == DType::FP32) f.template operator()<bf16, float>();
  else throw Error(ErrorCode::Internal, fmt::format("linear from {} to {} is not supported", name_of(x), name_of(y)));
}

struct Shards {
  bool column, row, rows_divided; // rows_divided: sequence parallel
  std::int64_t tp;
  explicit Shards(const model::Op& op) {
    const auto& a = std::get<LinearAttr>(op.attr);
    tp = a.tp;
    column = tp > 1 && a.mode == TensorParallel::Column;
    row = tp > 1 && a.mode == TensorParallel::Row;
    rows_divided = a.sequence_parallel;
  }
};

// A whole input, or the gradient of one; a whole output, or the gradient of one.
Bytes linear_scratch(const model::OpList& list, const model::Op& op, int step) {
  const Shards s(op);
  const model::Tensor &x = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
  const bool dgrad = step >= 0 && !op.steps[static_cast<size_t>(step)].grad_writes.empty();
  if (s.column) return round_up(s.rows_divided ? x.bytes() * s.tp : dgrad ? x.bytes() : 0, 8);
  if (s.row && s.rows_divided) return round_up(y.bytes() * s.tp, 8);
  return 0;
}

// inputs x [rows, in]; outputs y [rows, out]; parameters W [out, in], bias [out].
void linear_forward(const OpCall& c) {
  const Shards s(c.op());
  View x = c.in(0);
  const View y = c.out(0);
  std::span<std::byte> scratch = linear_scratch(c.list(), c.op(), -1) > 0 ? c.scratch(linear_scratch(c.list(), c.op(), -1)) : std::span<std::byte>();
  View whole = y; // before the sum over ranks
  if (s.column && s.rows_divided) {
    const View all = take(scratch, x.dtype, x.rows * s.tp, x.cols);
    gather_rows(c.group(Group::Tp), x, all);
    x = all;
  } else if (s.row && s.rows_divided) {
    whole = take(scratch, y.dtype, y.rows * s.tp, y.cols);
  }
  const View bias = c.op().params.size() > 1 ? c.param(1, 1, y.cols) : View{};
  with_linear_types(x.dtype, y.dtype, [&]<class T, class O>() {
    reference::linear_forward<T, O>(mat<T>(x), mat<T>(c.param(0, y.cols, x.cols)), values(s.row ? View{} : bias), mat<O>(whole));
  });
  if (!s.row) return;
  if (s.rows_divided) scatter_sum(c.group(Group::Tp), whole, {y, false});
  else reduce(c.group(Group::Tp), y);
  if (!bias) return;
  for (std::int64_t i = 0; i < y.rows; ++i)
    for (std::int64_t j = 0; j < y.cols; ++j) values(y).set(i, j, values(y).get(i, j) + values(bias).get(0, j));
}

void dgrad(const OpCall& c, const Shards& s, const View& dy, std::span<std::byte> scratch) {
  const GradView dx = c.d_in(0);
  if (!dx) return;
  GradView to = dx;
  if (s.column) to = {take(scratch, dx.to.dtype, dx.to.rows * (s.rows_divided ? s.tp : 1), dx.to.cols), false};
  with_linear_types(dx.to.dtype, dy.dtype, [&]<class T, class O>() {
    reference::linear_dgrad<T, O>(mat<O>(dy), mat<T>(c.param(0, dy.cols, dx.to.cols)), grad<T>(to));
  });
  if (!s.column) return;
  if (s.rows_divided) return scatter_sum(c.group(Group::Tp), to.to, dx);
  reduce(c.group(Group::Tp), to.to);
  copy_view(to.to, dx);
}

void wgrad(const OpCall& c, const Shards& s, const View& dy, std::span<std::byte> scratch) {
  const model::Tensor& input = c.list().tensor(c.op().inputs[0]);
  for (int p : c.backward_step().param_grads) {
    const View to = p == 0 ? c.param_grad(0, dy.cols, input.cols()) : c.param_grad(1, 1, dy.cols);
    if (p != 0) {
      with_type(dy.dtype, [&]<class O>() {
        if (to) reference::bias_grad<O>(mat<O>(dy), values(to));
      });
      continue;
    }
    View x = c.in(0);
    if (s.column && s.rows_divided) {
      const View all = take(scratch, x.dtype, x.rows * s.tp, x.cols);
      gather_rows(c.group(Group::Tp), x, all);
      x = all;
    }
    with_linear_types(x.dtype, dy.dtype, [&]<class T, class O>() {
      if (to) reference::linear_wgrad<T, O>(mat<O>(dy), mat<T>(x), mat<Acc<T>>(to));
    });
  }
}

void linear_backward(const OpCall& c) {
  const Shards s(c.op());
  const Bytes bytes = linear_scratch(c.list(), c.op(), c.step());
  std::span<std::byte> scratch = bytes > 0 ? c.scratch(bytes) : std::span<std::byte>();
  View dy = c.d_out(0);
  if (s.row && s.rows_divided) {
    const View all = take(scratch, dy.dtype, dy.rows * s.tp, dy.cols);
    gather_rows(c.group(Group::Tp), dy, all);
    dy = all;
  }
  if (!c.backward_step().grad_writes.empty()) dgrad(c, s, dy, scratch);
  if (!c.backward_step().param_grads.empty()) wgrad(c, s, dy, scratch);
}

} // namespace

std::span<const Entry> linear_ops() {
  static const Entry ops[] = {
      {model::OpKind::Linear, {linear_forward, linear_backward, linear_scratch}},
      {model::OpKind::LmHead, {linear_forward, linear_backward, linear_scratch}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
