#include "trainer/cuda/vocabulary.h"

#include <algorithm>

#include "kernels/loss/cross_entropy.h"
#include "kernels/ranks/vocabulary.h"

namespace gdn::trainer::cuda {

using model::LossAttr;
using model::LossForm;

namespace {

std::int64_t columns(const OpCall& c) { return c.attr<LossAttr>().vocab; }

// Labels as columns of this rank.
View labels_here(const OpCall& c, Engine& e, const View& labels, LaunchContext& memory) {
  View from = labels;
  from.rows *= from.cols;
  from.cols = from.stride = 1;
  const View to = take(memory, DType::Int64, from.rows, 1);
  kernels::local_ids(matrix(from), c.group(Group::Tp).rank() * columns(c), columns(c), matrix(to), e.launch());
  return to;
}

struct RankResults {
  View top, sum, label, spare;
  RankResults(LaunchContext& memory, std::int64_t tokens)
      : top(take(memory, DType::FP32, tokens, 1)), sum(take(memory, DType::FP32, tokens, 1)), label(take(memory, DType::FP32, tokens, 1)),
        spare(take(memory, DType::FP32, tokens, 1)) {}
  kernels::VocabularyParts from(std::int64_t first) const {
    auto at = [&](const View& v) { return data<float>(v) + first; };
    return {at(top), at(sum), at(label)};
  }
};

// Of all columns. Three reductions, or one gather where the op list says so.
void combine(const OpCall& c, Engine& e, const RankResults& p, LaunchContext& memory) {
  Communicator& group = c.group(Group::Tp);
  const std::int64_t n = p.top.rows;
  if (c.op().collectives.back().kind == model::CollectiveKind::AllGather) {
    const View mine = take(memory, DType::FP32, 3 * n, 1), all = take(memory, DType::FP32, 3 * n * group.size(), 1);
    copy(p.top, rows_of(mine, 0, n), e);
    copy(p.sum, rows_of(mine, n, n), e);
    copy(p.label, rows_of(mine, 2 * n, n), e);
    gather_rows(group, mine, all, e);
    return kernels::vocabulary_merge(data<float>(all), group.size(), n, p.from(0), e.launch());
  }
  copy(p.top, p.spare, e);
  reduce(group, p.top, Reduction::Max);
  kernels::vocabulary_rescale(data<float>(p.spare), p.from(0), n, e.launch());
  reduce(group, p.sum);
  reduce(group, p.label);
}

} // namespace

void divided_cross_entropy_forward(const OpCall& c, Engine& e) {
  const View logits = c.in(0);
  LaunchContext memory = ranks_memory(c, e);
  const View labels = labels_here(c, e, c.in(1), memory);
  const RankResults parts(memory, logits.rows);
  kernels::vocabulary_parts(matrix(logits), matrix(labels), parts.from(0), e.launch());
  combine(c, e, parts, memory);
  kernels::VocabularyLossParams p{.parts = parts.from(0), .logits = matrix(logits), .labels = matrix(labels), .loss = matrix(c.out(0))};
  name_kept(c, p);
  kernels::vocabulary_loss(p, e.launch());
}

void divided_cross_entropy_backward(const OpCall& c, Engine& e) {
  LaunchContext memory = ranks_memory(c, e);
  const View labels = labels_here(c, e, c.in(1), memory);
  kernels::cross_entropy_backward({.logits = matrix(c.in(0)), .lse = matrix(c.out(1)), .labels = matrix(labels), .d_loss = matrix(c.d_out(0)),
                                   .d_logits = gradient(c.d_in(0))}, e.launch());
}

namespace {

// Head and loss over chunks of tokens. Scratch: cuBLAS's workspace, x of all ranks where this one holds some rows, the
// logits of a chunk.
struct Chunks {
  LaunchContext context;
  View x, labels, logits;
  Matrix weight;
  Chunks(const OpCall& c, Engine& e, std::int64_t tokens, LaunchContext& memory) : context(e.launch(c)) {
    LaunchContext behind = context;
    cuda::take(behind, kernels::kGemmWorkspace);
    x = c.in(0);
    if (x.rows < tokens) {
      const View all = take(behind, x.dtype, tokens, x.cols);
      gather_rows(c.group(Group::Tp), x, all, e);
      x = all;
    }
    const std::int64_t chunk = c.attr<LossAttr>().chunk;
    logits = {static_cast<std::byte*>(behind.scratch), x.dtype, chunk > 0 ? std::min(chunk, tokens) : tokens, columns(c), columns(c)};
    labels = labels_here(c, e, c.in(1), memory);
    weight = matrix(c.param(0, columns(c), x.cols));
  }
  template <class F> void each(Engine& e, F&& f) const {
    for (std::int64_t first = 0; first < x.rows; first += logits.rows) {
      const std::int64_t rows = std::min(logits.rows, x.rows - first);
      const View here = rows_of(logits, 0, rows), hidden = rows_of(x, first, rows);
      e.gemm.run({.a = matrix(hidden), .b = weight, .transpose_b = true, .d = matrix(here)}, context);
      f(first, rows, hidden, here);
    }
  }
};

} // namespace

void divided_linear_cross_entropy_forward(const OpCall& c, Engine& e) {
  const View loss = c.out(0), lse = c.out(1);
  LaunchContext memory = ranks_memory(c, e);
  const Chunks chunks(c, e, loss.rows, memory);
  const RankResults parts(memory, loss.rows);
  chunks.each(e, [&](std::int64_t first, std::int64_t rows, const View&, const View& logits) {
    kernels::vocabulary_parts(matrix(logits), matrix(rows_of(chunks.labels, first, rows)), parts.from(first), e.launch());
  });
  combine(c, e, parts, memory);
  kernels::vocabulary_loss({.parts = parts.from(0), .labels = matrix(chunks.labels), .loss = matrix(loss), .lse = matrix(lse)}, e.launch());
}

void divided_linear_cross_entropy_backward(const OpCall& c, Engine& e) {
  const View d_loss = c.d_out(0), lse = c.out(1);
  const GradView dx = c.d_in(0);
  const View dw = c.param_grad(0, columns(c), c.in(0).cols);
  LaunchContext memory = ranks_memory(c, e);
  const Chunks chunks(c, e, d_loss.rows, memory);
  const View part = take(memory, chunks.x.dtype, chunks.x.rows, chunks.x.cols); // d:x of this rank's columns
  chunks.each(e, [&](std::int64_t first, std::int64_t rows, const View& hidden, const View& logits) {
    auto of = [&](const View& v) { return matrix(rows_of(v, first, rows)); };
    kernels::cross_entropy_backward({.logits = matrix(logits), .lse = of(lse), .labels = of(chunks.labels), .d_loss = of(d_loss),
                                     .d_logits = {matrix(logits), false}}, chunks.context); // in the place of the logits
    if (dx) e.gemm.run({.a = matrix(logits), .b = chunks.weight, .d = of(part)}, chunks.context);
    if (dw) e.gemm.run({.a = matrix(logits), .b = matrix(hidden), .transpose_a = true, .d = matrix(dw), .accumulate = true}, chunks.context);
  });
  if (!dx) return;
  if (dx.to.rows < part.rows) return scatter_sum(c.group(Group::Tp), part, dx, e);
  reduce(c.group(Group::Tp), part);
  copy(part, dx, e);
}

} // namespace gdn::trainer::cuda
