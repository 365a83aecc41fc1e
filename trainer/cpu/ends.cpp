#include <fmt/core.h>

#include <algorithm>

#include "reference/embedding.h"
#include "reference/heads.h"
#include "reference/linear.h"
#include "reference/loss.h"
#include "reference/mlp.h"
#include "trainer/cpu/collectives.h"
#include "trainer/cpu/vocabulary.h"

namespace gdn::trainer::cpu {

using model::LossAttr;
using model::LossForm;
using reference::kIgnoreLabel;

namespace {

// The batch's ids or labels; at multi-token depth d ("mtp0.labels") those d + 1 tokens later in the same
// sequence, where there are any.
void data_forward(const OpCall& c) {
  const std::string& name = c.op().name;
  const bool labels = name.find("labels") != std::string::npos;
  const auto from = labels ? c.batch().labels : c.batch().ids;
  const std::int64_t shift = name.rfind("mtp", 0) == 0 ? std::stoll(name.substr(3)) + 1 : 0;
  const auto to = ids_of(c.out(0));
  const auto sequences = c.batch().sequences, local = c.local_sequences(), positions = c.local_positions();
  for (size_t s = 0; s + 1 < sequences.size(); ++s)
    for (std::int64_t i = local[s]; i < local[s + 1]; ++i) {
      const std::int64_t t = (positions.empty() ? i : sequences[s] + positions[static_cast<size_t>(i)]) + shift;
      to[static_cast<size_t>(i)] = t < sequences[s + 1] ? from[static_cast<size_t>(t)] : labels ? kIgnoreLabel : 0;
    }
}

// inputs ids [N]; output y [N, h]; parameter [rows of the table, h].
View table(const OpCall& c, View whole) {
  const std::int64_t hidden = c.attr<model::RowsAttr>().width;
  whole.rows = whole.rows * whole.cols / hidden;
  whole.cols = whole.stride = hidden;
  return whole;
}
std::int64_t table_elements(const OpCall& c) { return c.op().params[0].elements; }
// Over TP ranks every rank holds rows of the table: outputs are sums; with sequence parallelism a rank keeps
// its rows of them, and gathers their gradient.
struct Vocabulary {
  std::int64_t tp = 1, first = 0, rows = 0;
  bool rows_divided = false;
  Vocabulary(const model::OpList& list, const model::Op& op) {
    if (op.collectives.empty()) return;
    tp = op.collectives[0].ranks;
    rows_divided = list.tensor(op.outputs[0]).rows() < list.tensor(op.inputs[0]).rows();
  }
  void place(const OpCall& c, std::int64_t rows_here) {
    rows = rows_here;
    if (tp > 1) first = c.group(Group::Tp).rank() * rows;
  }
};
Bytes embedding_scratch(const model::OpList& list, const model::Op& op, int) {
  const Vocabulary v(list, op);
  return v.rows_divided ? round_up(list.tensor(op.outputs[0]).bytes() * v.tp, 8) : 0;
}
void embedding_forward(const OpCall& c) {
  const View y = c.out(0), rows = table(c, c.param(0, 1, table_elements(c)));
  Vocabulary v(c.list(), c.op());
  v.place(c, rows.rows);
  View whole = y;
  if (v.rows_divided) {
    std::span<std::byte> scratch = c.scratch(embedding_scratch(c.list(), c.op(), -1));
    whole = take(scratch, y.dtype, y.rows * v.tp, y.cols);
  }
  with_type(y.dtype, [&]<class T>() {
    reference::embedding_forward<T>(ids_of(c.in(0)), mat<T>(rows), mat<T>(whole), v.first, v.rows * v.tp);
  });
  if (v.rows_divided) scatter_sum(c.group(Group::Tp), whole, {y, false});
  else if (v.tp > 1) reduce(c.group(Group::Tp), y);
}
void embedding_backward(const OpCall& c) {
  View dy = c.d_out(0);
  const auto ids = ids_of(c.in(0));
  Vocabulary v(c.list(), c.op());
  if (v.rows_divided) {
    std::span<std::byte> scratch = c.scratch(embedding_scratch(c.list(), c.op(), c.step()));
    const View all = take(scratch, dy.dtype, dy.rows * v.tp, dy.cols);
    gather_rows(c.group(Group::Tp), dy, all);
    dy = all;
  }
  if (View dtable = c.param_grad(0, 1, table_elements(c))) {
    const View rows = table(c, dtable);
    v.place(c, rows.rows);
    with_type(dy.dtype, [&]<class T>() { reference::embedding_backward<T>(ids, mat<T>(dy), mat<Acc<T>>(rows), v.first); });
  }
}

// Inputs side by side, or one below the other where they are as wide as the output.
template <class F> void for_parts(const OpCall& c, View whole, F&& f) {
  const bool below = c.list().tensor(c.op().inputs[0]).cols() == whole.cols;
  std::int64_t at = 0;
  for (size_t i = 0; i < c.op().inputs.size(); ++i) {
    const model::Tensor& t = c.list().tensor(c.op().inputs[i]);
    View part = whole;
    part.rows = t.rows();
    part.cols = t.cols();
    part.data += (below ? at * whole.stride : at) * size_of(whole.dtype);
    at += below ? t.rows() : t.cols();
    f(i, part);
  }
}
void concat_forward(const OpCall& c) {
  for_parts(c, c.out(0), [&](size_t i, View part) {
    with_type(part.dtype, [&]<class T>() { reference::copy<T>(mat<T>(c.in(i)), mat<T>(part)); });
  });
}
void concat_backward(const OpCall& c) {
  for_parts(c, c.d_out(0), [&](size_t i, View part) {
    if (GradView d = c.d_in(i)) with_type(part.dtype, [&]<class T>() { reference::copy<T>(mat<T>(part), grad<T>(d)); });
  });
}

// ---------------------------------------------------------------------------------- loss ----

// One row at a time: a row's result does not depend on the others, and each has its own gradient scale.
View row_of(View v, std::int64_t i) {
  v.data += i * v.stride * size_of(v.dtype);
  v.rows = 1;
  return v;
}

// inputs logits [N, V], labels [N]; outputs loss [N] and what attr.form keeps.
void cross_entropy_forward(const OpCall& c) {
  if (!c.op().collectives.empty()) return divided_cross_entropy_forward(c);
  const View logits = c.in(0), loss = c.out(0);
  const auto labels = ids_of(c.in(1));
  const LossForm form = c.attr<LossAttr>().form;
  with_type(logits.dtype, [&]<class T>() {
    for (std::int64_t i = 0; i < logits.rows; ++i) {
      const auto label = labels.subspan(static_cast<size_t>(i), 1);
      const Mat<T> row = mat<T>(row_of(logits, i));
      reference::LossSum sum;
      switch (form) {
      case LossForm::Softmax: sum = reference::cross_entropy_softmax_forward<T>(row, label, mat<Acc<T>>(row_of(c.out(1), i))); break;
      case LossForm::Overwrite: sum = reference::cross_entropy_fused<T>(mat<T>(row_of(c.out(1), i)), label, 1); break;
      case LossForm::Logits: sum = reference::cross_entropy_forward<T>(row, label, values(row_of(c.out(1), i))); break;
      }
      values(loss).set(i, 0, sum.sum);
    }
  });
  if (form != LossForm::Softmax) return;
  const View mask = c.out(2), kept = c.out(3);
  for (std::int64_t i = 0; i < logits.rows; ++i) {
    const std::int64_t label = labels[static_cast<size_t>(i)];
    values(mask).set(i, 0, label == kIgnoreLabel);
    values(kept).set(i, 0, static_cast<double>(label == kIgnoreLabel ? 0 : label));
  }
}

void cross_entropy_backward(const OpCall& c) {
  if (!c.op().collectives.empty() && c.attr<LossAttr>().form == LossForm::Logits) return divided_cross_entropy_backward(c);
  const View dloss = c.d_out(0);
  const GradView dlogits = c.d_in(0);
  const LossForm form = c.attr<LossAttr>().form;
  const View kept = c.out(1); // softmax, gradient or log-sum-exp
  View mask, ids;
  if (form == LossForm::Softmax) {
    mask = c.out(2);
    ids = c.out(3);
  } else if (form == LossForm::Logits) {
    ids = c.in(1);
  }
  with_type(dlogits.to.dtype, [&]<class T>() {
    for (std::int64_t i = 0; i < dlogits.to.rows; ++i) {
      const double scale = values(dloss).get(i, 0);
      const reference::Grad<T> to(mat<T>(row_of(dlogits.to, i)), dlogits.accumulate ? Write::Accumulate : Write::Overwrite);
      if (form == LossForm::Overwrite) {
        reference::scale<T>(scale, mat<T>(row_of(kept, i)), to);
        continue;
      }
      std::int64_t label = static_cast<std::int64_t>(values(ids).get(i, 0));
      if (mask && values(mask).get(i, 0) != 0) label = kIgnoreLabel;
      const std::span<const std::int64_t> one(&label, 1);
      if (form == LossForm::Softmax) reference::cross_entropy_softmax_backward<T>(mat<Acc<T>>(row_of(kept, i)), one, scale, to);
      else reference::cross_entropy_backward<T>(mat<T>(row_of(c.in(0), i)), one, values(row_of(kept, i)), scale, to);
    }
  });
}

// Head and loss over chunks of tokens; the logits of a chunk live in scratch.
std::int64_t chunk_rows(const model::OpList& list, const model::Op& op) {
  const std::int64_t rows = list.tensor(op.inputs[0]).rows(), chunk = std::get<LossAttr>(op.attr).chunk;
  return chunk > 0 ? std::min(chunk, rows) : rows;
}
Bytes chunk_scratch(const model::OpList& list, const model::Op& op, int step) {
  if (!op.collectives.empty()) return divided_loss_scratch(list, op, step);
  return chunk_rows(list, op) * std::get<LossAttr>(op.attr).vocab * size_of(list.tensor(op.inputs[0]).dtype);
}

template <class F> void for_chunks(const OpCall& c, View x, F&& f) {
  const std::int64_t chunk = chunk_rows(c.list(), c.op()), vocab = c.attr<LossAttr>().vocab;
  std::byte* scratch = c.scratch(chunk_scratch(c.list(), c.op(), c.step())).data();
  const View weight = c.param(0, vocab, x.cols);
  for (std::int64_t first = 0; first < x.rows; first += chunk) {
    View rows = row_of(x, first), logits{scratch, x.dtype, std::min(chunk, x.rows - first), vocab, vocab};
    rows.rows = logits.rows;
    with_type(x.dtype, [&]<class T>() { reference::linear_forward<T, T>(mat<T>(rows), mat<T>(weight), {}, mat<T>(logits)); });
    f(first, rows, logits, weight);
  }
}

// inputs x [N, h], labels; outputs loss, log-sum-exp [N]; parameter [V, h].
void chunked_forward(const OpCall& c) {
  if (!c.op().collectives.empty()) return divided_linear_cross_entropy_forward(c);
  const auto labels = ids_of(c.in(1));
  const View x = c.in(0), loss = c.out(0), lse = c.out(1);
  for_chunks(c, x, [&](std::int64_t first, View, View logits, View) {
    with_type(x.dtype, [&]<class T>() {
      for (std::int64_t i = 0; i < logits.rows; ++i)
        values(loss).set(first + i, 0, reference::cross_entropy_forward<T>(mat<T>(row_of(logits, i)), labels.subspan(static_cast<size_t>(first + i), 1),
                                                                           values(row_of(lse, first + i))).sum);
    });
  });
}
void chunked_backward(const OpCall& c) {
  if (!c.op().collectives.empty()) return divided_linear_cross_entropy_backward(c);
  const auto labels = ids_of(c.in(1));
  const View x = c.in(0), dloss = c.d_out(0), lse = c.out(1);
  const GradView dx = c.d_in(0);
  const View dw = c.param_grad(0, c.attr<LossAttr>().vocab, x.cols);
  for_chunks(c, x, [&](std::int64_t first, View rows, View logits, View weight) {
    with_type(x.dtype, [&]<class T>() {
      for (std::int64_t i = 0; i < logits.rows; ++i) // the gradient takes the place of the logits
        reference::cross_entropy_backward<T>(mat<T>(row_of(logits, i)), labels.subspan(static_cast<size_t>(first + i), 1),
                                             values(row_of(lse, first + i)), values(dloss).get(first + i, 0), mat<T>(row_of(logits, i)));
      if (dx) {
        View to = row_of(dx.to, first);
        to.rows = logits.rows;
        reference::linear_dgrad<T, T>(mat<T>(logits), mat<T>(weight), grad<T>({to, dx.accumulate}));
      }
      if (dw) reference::linear_wgrad<T, T>(mat<T>(logits), mat<T>(rows), mat<Acc<T>>(dw));
    });
  });
}

// The mean over the valid labels of the step. Losses of multi-token prediction ("mtp0.loss") share the
// weight mtp_loss_scaling_factor, 0.1 in Megatron-LM.
constexpr double kMtpWeight = 0.1;

bool is_mtp(const OpCall& c, size_t i) { return c.list().tensor(c.op().inputs[i]).name.rfind("mtp", 0) == 0; }
double loss_weight(const OpCall& c, size_t i) {
  return is_mtp(c, i) ? kMtpWeight / static_cast<double>(c.op().inputs.size() - 1) : 1;
}
void loss_sum_forward(const OpCall& c) {
  double sum = 0, mtp = 0;
  for (size_t i = 0; i < c.op().inputs.size(); ++i) {
    const View loss = c.in(i);
    double part = 0;
    for (std::int64_t t = 0; t < loss.rows; ++t) part += values(loss).get(t, 0);
    (is_mtp(c, i) ? mtp : sum) += loss_weight(c, i) * part;
  }
  if (c.pass() != program::Pass::Forward || c.context().totals == nullptr) return;
  c.context().totals->loss_sum += sum;
  c.context().totals->mtp_sum += mtp;
  c.context().totals->valid += reference::count_valid(c.batch().labels);
}
void loss_sum_backward(const OpCall& c) {
  for (size_t i = 0; i < c.op().inputs.size(); ++i)
    if (GradView d = c.d_in(i))
      for (std::int64_t t = 0; t < d.to.rows; ++t)
        values_grad(d).put(t, 0, c.context().loss_scale * loss_weight(c, i));
}

} // namespace

std::span<const Entry> ends_ops() {
  static const Entry ops[] = {
      {model::OpKind::Data, {data_forward, nullptr}},
      {model::OpKind::Embedding, {embedding_forward, embedding_backward, embedding_scratch}},
      {model::OpKind::Concat, {concat_forward, concat_backward}},
      {model::OpKind::CrossEntropy, {cross_entropy_forward, cross_entropy_backward, divided_loss_scratch}},
      {model::OpKind::LinearCrossEntropy, {chunked_forward, chunked_backward, chunk_scratch}},
      {model::OpKind::LossSum, {loss_sum_forward, loss_sum_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
