#include "trainer/cpu/vocabulary.h"

#include <algorithm>
#include <cmath>

#include "reference/linear.h"
#include "reference/loss.h"
#include "reference/mlp.h"
#include "trainer/cpu/collectives.h"

namespace gdn::trainer::cpu {

using model::LossAttr;
using model::LossForm;
using reference::kIgnoreLabel;

namespace {

bool is_chunked(const model::Op& op) { return op.kind == model::OpKind::LinearCrossEntropy; }
std::int64_t chunk_rows(const model::Op& op, std::int64_t rows) {
  const std::int64_t chunk = std::get<LossAttr>(op.attr).chunk;
  return chunk > 0 ? std::min(chunk, rows) : rows;
}
DType column_type(const model::OpList& list, const model::Op& op) { return list.tensor(op.outputs[0]).dtype; }

// Per token, of this rank's columns: maximum, sum of exponentials above it, the label's logit (0 where it is
// another rank's).
struct Columns {
  View top, sum, label, spare;
  Columns(std::span<std::byte>& memory, DType dtype, std::int64_t tokens)
      : top(take(memory, dtype, tokens, 1)), sum(take(memory, dtype, tokens, 1)), label(take(memory, dtype, tokens, 1)),
        spare(take(memory, dtype, tokens, 1)) {}
};
Bytes columns_bytes(DType dtype, std::int64_t tokens) { return 4 * round_up(tokens * size_of(dtype), 8); }

std::int64_t first_column(const OpCall& c) { return c.group(Group::Tp).rank() * c.attr<LossAttr>().vocab; }

void find(const OpCall& c, const View& logits, std::span<const std::int64_t> labels, const Columns& x) {
  with_type(logits.dtype, [&]<class T>() {
    reference::vocab_row_max<T>(mat<T>(logits), values(x.top));
    reference::vocab_exp_sum<T>(mat<T>(logits), labels, first_column(c), values(x.top), values(x.sum), values(x.label));
  });
}

// Of all columns. Three reductions, or one gather where the op list says so.
void combine(const OpCall& c, const Columns& x, std::span<std::byte> memory) {
  Communicator& group = c.group(Group::Tp);
  const std::int64_t n = x.top.rows;
  if (c.op().collectives.back().kind == model::CollectiveKind::AllGather) {
    const View mine = take(memory, x.top.dtype, 3, n), all = take(memory, x.top.dtype, 3 * group.size(), n);
    const reference::Values m = values(mine);
    for (std::int64_t t = 0; t < n; ++t) {
      m.set(0, t, values(x.top).get(t, 0));
      m.set(1, t, values(x.sum).get(t, 0));
      m.set(2, t, values(x.label).get(t, 0));
    }
    gather_rows(group, mine, all);
    const reference::Values a = values(all);
    for (std::int64_t t = 0; t < n; ++t) {
      double top = a.get(0, t), sum = 0, label = 0;
      for (std::int64_t r = 1; r < group.size(); ++r) top = std::max(top, a.get(3 * r, t));
      for (std::int64_t r = 0; r < group.size(); ++r) {
        sum += a.get(3 * r + 1, t) * std::exp(a.get(3 * r, t) - top);
        label += a.get(3 * r + 2, t);
      }
      values(x.top).set(t, 0, top);
      values(x.sum).set(t, 0, sum);
      values(x.label).set(t, 0, label);
    }
    return;
  }
  copy_view(x.top, x.spare);
  reduce(group, x.top, Reduction::Max);
  for (std::int64_t t = 0; t < n; ++t) values(x.sum).set(t, 0, values(x.sum).get(t, 0) * std::exp(values(x.spare).get(t, 0) - values(x.top).get(t, 0)));
  reduce(group, x.sum);
  reduce(group, x.label);
}

double lse_of(const Columns& x, std::int64_t t) { return values(x.top).get(t, 0) + std::log(values(x.sum).get(t, 0)); }

void store_loss(const Columns& x, std::span<const std::int64_t> labels, const View& loss) {
  for (std::int64_t t = 0; t < loss.rows; ++t)
    values(loss).set(t, 0, labels[static_cast<size_t>(t)] == kIgnoreLabel ? 0 : lse_of(x, t) - values(x.label).get(t, 0));
}

// A label as a column of this rank: -1 where it is another's.
std::int64_t column_of(const OpCall& c, std::int64_t label) {
  if (label == kIgnoreLabel) return label;
  const std::int64_t column = label - first_column(c);
  return column >= 0 && column < c.attr<LossAttr>().vocab ? column : -1;
}

// Gradient of rows of logits from their log-sum-exp, row by row since each has its own scale.
void logits_backward(const OpCall& c, const View& logits, std::span<const std::int64_t> labels, const View& lse, const View& dloss,
                     const GradView& to) {
  with_type(logits.dtype, [&]<class T>() {
    for (std::int64_t i = 0; i < logits.rows; ++i) {
      const std::int64_t label = column_of(c, labels[static_cast<size_t>(i)]);
      reference::cross_entropy_backward<T>(mat<T>(rows_of(logits, i, 1)), {&label, 1}, values(rows_of(lse, i, 1)), values(dloss).get(i, 0),
                                           grad<T>({rows_of(to.to, i, 1), to.accumulate}));
    }
  });
}

} // namespace

Bytes divided_loss_scratch(const model::OpList& list, const model::Op& op, int step) {
  if (op.collectives.empty()) return 0;
  const model::Tensor& x = list.tensor(op.inputs[0]);
  const std::int64_t tokens = list.tensor(op.outputs[0]).rows(), tp = op.collectives[0].ranks;
  const DType column = column_type(list, op);
  if (!is_chunked(op))
    return step >= 0 ? 0 : columns_bytes(column, tokens) + round_up(3 * tokens * size_of(column), 8) + round_up(3 * tp * tokens * size_of(column), 8);
  const Bytes whole = round_up(tokens * x.cols() * size_of(x.dtype), 8);
  Bytes bytes = round_up(chunk_rows(op, tokens) * std::get<LossAttr>(op.attr).vocab * size_of(x.dtype), 8);
  if (x.rows() < tokens) bytes += whole; // x of all ranks
  return bytes + (step < 0 ? columns_bytes(column, tokens) : whole); // its gradient
}

void divided_cross_entropy_forward(const OpCall& c) {
  const View logits = c.in(0), loss = c.out(0), kept = c.out(1);
  const auto labels = ids_of(c.in(1));
  std::span<std::byte> scratch = c.scratch(divided_loss_scratch(c.list(), c.op(), -1));
  const Columns x(scratch, loss.dtype, logits.rows);
  find(c, logits, labels, x);
  combine(c, x, scratch);
  store_loss(x, labels, loss);
  const LossForm form = c.attr<LossAttr>().form;
  if (form == LossForm::Overwrite) {
    with_type(logits.dtype, [&]<class T>() {
      reference::vocab_backward<T>(mat<T>(logits), labels, first_column(c), values(x.top), values(x.sum), 1, mat<T>(kept));
    });
    return;
  }
  if (form == LossForm::Logits) {
    for (std::int64_t t = 0; t < kept.rows; ++t) values(kept).set(t, 0, lse_of(x, t));
    return;
  }
  const View mask = c.out(2), ids = c.out(3);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    const double lse = lse_of(x, t);
    for (std::int64_t j = 0; j < logits.cols; ++j) values(kept).set(t, j, std::exp(values(logits).get(t, j) - lse));
    const std::int64_t label = labels[static_cast<size_t>(t)];
    values(mask).set(t, 0, label == kIgnoreLabel);
    values(ids).set(t, 0, static_cast<double>(label == kIgnoreLabel ? 0 : column_of(c, label)));
  }
}

// From the logits; the other forms read nothing that differs from a whole vocabulary's.
void divided_cross_entropy_backward(const OpCall& c) {
  logits_backward(c, c.in(0), ids_of(c.in(1)), c.out(1), c.d_out(0), c.d_in(0));
}

namespace {

// x of all ranks, and what f(first token, rows of x, their logits) does with each chunk.
View whole_input(const OpCall& c, std::int64_t tokens, std::span<std::byte>& scratch) {
  const View x = c.in(0);
  if (x.rows == tokens) return x;
  const View all = take(scratch, x.dtype, tokens, x.cols);
  gather_rows(c.group(Group::Tp), x, all);
  return all;
}
template <class F> void for_chunks(const OpCall& c, const View& x, const View& logits_memory, F&& f) {
  const View weight = c.param(0, c.attr<LossAttr>().vocab, x.cols);
  for (std::int64_t first = 0; first < x.rows; first += logits_memory.rows) {
    const std::int64_t n = std::min(logits_memory.rows, x.rows - first);
    const View rows = rows_of(x, first, n), logits = rows_of(logits_memory, 0, n);
    with_type(x.dtype, [&]<class T>() { reference::linear_forward<T, T>(mat<T>(rows), mat<T>(weight), {}, mat<T>(logits)); });
    f(first, rows, logits);
  }
}

} // namespace

void divided_linear_cross_entropy_forward(const OpCall& c) {
  const auto labels = ids_of(c.in(1));
  const View loss = c.out(0), lse = c.out(1);
  std::span<std::byte> scratch = c.scratch(divided_loss_scratch(c.list(), c.op(), -1));
  const View x = whole_input(c, loss.rows, scratch);
  const View chunk = take(scratch, x.dtype, chunk_rows(c.op(), x.rows), c.attr<LossAttr>().vocab);
  Columns all(scratch, loss.dtype, x.rows);
  for_chunks(c, x, chunk, [&](std::int64_t first, const View&, const View& logits) {
    Columns part = all;
    for (View* v : {&part.top, &part.sum, &part.label}) *v = rows_of(*v, first, logits.rows);
    find(c, logits, labels.subspan(static_cast<size_t>(first), static_cast<size_t>(logits.rows)), part);
  });
  combine(c, all, scratch);
  store_loss(all, labels, loss);
  for (std::int64_t t = 0; t < lse.rows; ++t) values(lse).set(t, 0, lse_of(all, t));
}

void divided_linear_cross_entropy_backward(const OpCall& c) {
  const auto labels = ids_of(c.in(1));
  const View dloss = c.d_out(0), lse = c.out(1);
  const GradView dx = c.d_in(0);
  std::span<std::byte> scratch = c.scratch(divided_loss_scratch(c.list(), c.op(), c.step()));
  const View x = whole_input(c, dloss.rows, scratch);
  const View chunk = take(scratch, x.dtype, chunk_rows(c.op(), x.rows), c.attr<LossAttr>().vocab);
  const View whole = take(scratch, x.dtype, x.rows, x.cols); // d:x of this rank's columns
  const View weight = c.param(0, c.attr<LossAttr>().vocab, x.cols), dw = c.param_grad(0, c.attr<LossAttr>().vocab, x.cols);
  for_chunks(c, x, chunk, [&](std::int64_t first, const View& rows, const View& logits) {
    logits_backward(c, logits, labels.subspan(static_cast<size_t>(first), static_cast<size_t>(logits.rows)), rows_of(lse, first, logits.rows),
                    rows_of(dloss, first, logits.rows), {logits, false});
    with_type(x.dtype, [&]<class T>() {
      reference::linear_dgrad<T, T>(mat<T>(logits), mat<T>(weight), mat<T>(rows_of(whole, first, logits.rows)));
      if (dw) reference::linear_wgrad<T, T>(mat<T>(logits), mat<T>(rows), mat<Acc<T>>(dw));
    });
  });
  if (!dx) return;
  if (dx.to.rows < x.rows) return scatter_sum(c.group(Group::Tp), whole, dx);
  reduce(c.group(Group::Tp), whole);
  copy_view(whole, dx);
}

} // namespace gdn::trainer::cpu
