#include <algorithm>

#include <fmt/core.h>

#include "kernels/common/elementwise.h"
#include "kernels/common/reduce.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/loss/embedding.h"
#include "kernels/ranks/rows.h"
#include "kernels/ranks/vocabulary.h"
#include "trainer/cuda/vocabulary.h"

namespace gdn::trainer::cuda {

using model::LossAttr;
using model::LossForm;

namespace {

constexpr std::int64_t kIgnoreLabel = -100;

// The batch's ids or labels; at multi-token depth d ("mtp0.labels") those d + 1 tokens later in the same sequence, where
// there are any.
void data_forward(const OpCall& c, Engine& e) {
  const std::string& name = c.op().name;
  const bool labels = name.find("labels") != std::string::npos;
  const std::int64_t shift = name.rfind("mtp", 0) == 0 ? std::stoll(name.substr(3)) + 1 : 0;
  const DeviceBatch& b = e.batch(c);
  View to = c.out(0);
  to.rows *= to.cols;
  to.cols = to.stride = 1;
  const std::int64_t* from = labels ? b.labels : b.ids;
  const std::int64_t outside = labels ? kIgnoreLabel : 0;
  if (b.local_tokens) kernels::shift_tokens_of(from, b.positions, b.tokens, b.local_tokens, shift, outside, matrix(to), e.launch());
  else kernels::shift_tokens(from, b.positions, shift, outside, matrix(to), e.launch());
}

// inputs ids [N]; output y [N, h]; parameter [rows of the table, h].
View table(const OpCall& c, View whole) {
  const std::int64_t hidden = c.attr<model::RowsAttr>().width;
  whole.rows = whole.rows * whole.cols / hidden;
  whole.cols = whole.stride = hidden;
  return whole;
}
std::int64_t table_elements(const OpCall& c) { return c.op().params[0].elements; }
// Over TP ranks every rank holds rows of the table, ids of others' rows add nothing, and outputs are sums; with sequence
// parallelism a rank keeps its rows of them, and gathers their gradient.
View ids_here(const OpCall& c, Engine& e, std::int64_t rows, LaunchContext& memory) {
  View ids = c.in(0);
  if (c.op().collectives.empty()) return ids;
  ids.rows *= ids.cols;
  ids.cols = ids.stride = 1;
  const View here = take(memory, DType::Int64, ids.rows, 1);
  kernels::local_ids(matrix(ids), c.group(Group::Tp).rank() * rows, rows, matrix(here), e.launch());
  return here;
}
void embedding_forward(const OpCall& c, Engine& e) {
  const View rows = table(c, c.param(0, 1, table_elements(c))), y = c.out(0);
  LaunchContext memory = ranks_memory(c, e);
  const View ids = ids_here(c, e, rows.rows, memory);
  const bool divided = !c.op().collectives.empty(), scatters = divided && y.rows < ids.rows;
  const View whole = scatters ? take(memory, y.dtype, ids.rows, y.cols) : y;
  kernels::embedding_forward(matrix(ids), matrix(rows), matrix(whole), e.launch());
  if (scatters) scatter_sum(c.group(Group::Tp), whole, {y, false}, e);
  else if (divided) reduce(c.group(Group::Tp), y);
}
void embedding_backward(const OpCall& c, Engine& e) {
  View dy = c.d_out(0);
  const View d = c.param_grad(0, 1, table_elements(c));
  LaunchContext memory = ranks_memory(c, e);
  const View ids = ids_here(c, e, table_elements(c) / c.attr<model::RowsAttr>().width, memory);
  if (!c.op().collectives.empty() && dy.rows < ids.rows) {
    const View all = take(memory, dy.dtype, ids.rows, dy.cols);
    gather_rows(c.group(Group::Tp), dy, all, e);
    dy = all;
  }
  if (d) kernels::embedding_backward(matrix(ids), matrix(dy), matrix(table(c, d)), e.launch(c));
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
void concat_forward(const OpCall& c, Engine& e) {
  for_parts(c, c.out(0), [&](size_t i, View part) { kernels::copy(matrix(c.in(i)), {matrix(part), false}, e.launch()); });
}
void concat_backward(const OpCall& c, Engine& e) {
  for_parts(c, c.d_out(0), [&](size_t i, View part) {
    if (const GradView d = c.d_in(i)) kernels::copy(matrix(part), gradient(d), e.launch());
  });
}

// ---------------------------------------------------------------------------------- loss ----

// inputs logits [N, V], labels [N]; outputs loss [N] and what attr.form keeps.
void cross_entropy_forward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty()) return divided_cross_entropy_forward(c, e);
  kernels::CrossEntropyForwardParams p{.logits = matrix(c.in(0)), .labels = matrix(c.in(1)), .loss = matrix(c.out(0))};
  name_kept(c, p);
  kernels::cross_entropy_forward(p, e.launch());
}

void cross_entropy_backward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty() && c.attr<LossAttr>().form == LossForm::Logits) return divided_cross_entropy_backward(c, e);
  const View d_loss = c.d_out(0), kept = c.out(1);
  const GradView d_logits = c.d_in(0);
  kernels::CrossEntropyBackwardParams p{.d_loss = matrix(d_loss), .d_logits = gradient(d_logits)};
  switch (c.attr<LossAttr>().form) {
  case LossForm::Overwrite: return kernels::scale(1, matrix(kept), p.d_loss, p.d_logits, e.launch());
  case LossForm::Softmax:
    p.softmax = matrix(kept);
    p.mask = matrix(c.out(2));
    p.labels = matrix(c.out(3));
    break;
  case LossForm::Logits:
    p.logits = matrix(c.in(0));
    p.labels = matrix(c.in(1));
    p.lse = matrix(kept);
    break;
  }
  kernels::cross_entropy_backward(p, e.launch());
}

// Head and loss over chunks of tokens; the logits of a chunk live in scratch behind the GEMM's workspace.
std::int64_t chunk_rows(const OpCall& c, const View& x) {
  const std::int64_t chunk = c.attr<LossAttr>().chunk;
  return chunk > 0 ? std::min(chunk, x.rows) : x.rows;
}
template <class F> void for_chunks(const OpCall& c, Engine& e, const View& x, F&& f) {
  const std::int64_t chunk = chunk_rows(c, x), vocab = c.attr<LossAttr>().vocab;
  const LaunchContext context = e.launch(c);
  LaunchContext behind = context;
  take(behind, kernels::kGemmWorkspace);
  const Matrix weight = matrix(c.param(0, vocab, x.cols));
  for (std::int64_t first = 0; first < x.rows; first += chunk) {
    const std::int64_t rows = std::min(chunk, x.rows - first);
    const Matrix hidden = kernels::row_range(matrix(x), first, rows), logits{behind.scratch, x.dtype, rows, vocab, vocab};
    e.gemm.run({.a = hidden, .b = weight, .transpose_b = true, .d = logits}, context);
    f(first, rows, hidden, logits, weight, context);
  }
}

// inputs x [N, h], labels; outputs loss, log-sum-exp [N]; parameter [V, h].
void chunked_forward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty()) return divided_linear_cross_entropy_forward(c, e);
  const View x = c.in(0), labels = c.in(1), loss = c.out(0), lse = c.out(1);
  for_chunks(c, e, x, [&](std::int64_t first, std::int64_t rows, const Matrix&, const Matrix& logits, const Matrix&, const LaunchContext& context) {
    auto part = [&](const View& v) { return kernels::row_range(matrix(v), first, rows); };
    kernels::cross_entropy_forward({.logits = logits, .labels = part(labels), .loss = part(loss), .lse = part(lse)}, context);
  });
}
void chunked_backward(const OpCall& c, Engine& e) {
  if (!c.op().collectives.empty()) return divided_linear_cross_entropy_backward(c, e);
  const View x = c.in(0), labels = c.in(1), d_loss = c.d_out(0), lse = c.out(1);
  const GradView dx = c.d_in(0);
  const View dw = c.param_grad(0, c.attr<LossAttr>().vocab, x.cols);
  for_chunks(c, e, x, [&](std::int64_t first, std::int64_t rows, const Matrix& hidden, const Matrix& logits, const Matrix& weight,
                          const LaunchContext& context) {
    auto part = [&](const View& v) { return kernels::row_range(matrix(v), first, rows); };
    kernels::cross_entropy_backward({.logits = logits, .lse = part(lse), .labels = part(labels), .d_loss = part(d_loss),
                                     .d_logits = {logits, false}}, context); // in the place of the logits
    if (dx) e.gemm.run({.a = logits, .b = weight, .d = part(dx.to), .accumulate = dx.accumulate}, context);
    if (dw) e.gemm.run({.a = logits, .b = hidden, .transpose_a = true, .d = matrix(dw), .accumulate = true}, context);
  });
}

// The mean over the valid labels of the step. Losses of multi-token prediction ("mtp0.loss") share the weight
// mtp_loss_scaling_factor, 0.1 in Megatron-LM.
constexpr double kMtpWeight = 0.1;

bool is_mtp(const OpCall& c, size_t i) { return c.list().tensor(c.op().inputs[i]).name.rfind("mtp", 0) == 0; }
double loss_weight(const OpCall& c, size_t i) {
  return is_mtp(c, i) ? kMtpWeight / static_cast<double>(c.op().inputs.size() - 1) : 1;
}
void loss_sum_forward(const OpCall& c, Engine& e) {
  const bool counts = c.pass() == program::Pass::Forward && c.context().totals != nullptr;
  for (size_t i = 0; i < c.op().inputs.size(); ++i) {
    const View loss = c.in(i);
    if (counts) kernels::add_sum(matrix(loss), loss_weight(c, i), e.totals.sums + (is_mtp(c, i) ? DeviceTotals::kMtp : DeviceTotals::kLoss), e.launch());
  }
  if (!counts) return;
  const auto labels = c.batch().labels;
  c.context().totals->valid += static_cast<std::int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), kIgnoreLabel);
}
void loss_sum_backward(const OpCall& c, Engine& e) {
  for (size_t i = 0; i < c.op().inputs.size(); ++i)
    if (const GradView d = c.d_in(i)) kernels::fill(gradient(d), static_cast<float>(c.context().loss_scale * loss_weight(c, i)), e.launch());
}

} // namespace

std::span<const Entry> ends_ops() {
  static const Entry ops[] = {
      {model::OpKind::Data, {data_forward, nullptr}},
      {model::OpKind::Embedding, {embedding_forward, embedding_backward}},
      {model::OpKind::Concat, {concat_forward, concat_backward}},
      {model::OpKind::CrossEntropy, {cross_entropy_forward, cross_entropy_backward}},
      {model::OpKind::LinearCrossEntropy, {chunked_forward, chunked_backward}},
      {model::OpKind::LossSum, {loss_sum_forward, loss_sum_backward}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
