#include "trainer/cuda/context.h"

#include <limits>
#include <numeric>

#include "kernels/attention/core.h"
#include "kernels/common/elementwise.h"
#include "trainer/comm/ranks.h"

namespace gdn::trainer::cuda {

namespace {

// ---------------------------------------------------------------------------------- attention ----

struct Sizes {
  int heads, kv_heads, dim;
  std::int64_t local, cp, all; // tokens of this rank; ranks; tokens of all
  explicit Sizes(const OpCall& c) {
    const auto& a = c.attr<model::AttentionAttr>();
    heads = static_cast<int>(a.heads);
    kv_heads = static_cast<int>(a.kv_heads);
    dim = static_cast<int>(a.head_dim);
    local = static_cast<std::int64_t>(c.local_positions().size());
    cp = c.group(Group::Cp).size();
    all = local * cp;
  }
  std::int64_t q_width() const { return std::int64_t{heads} * dim; }
  std::int64_t kv_width() const { return std::int64_t{kv_heads} * dim; }
};

// k and v of all tokens, in their order. Ranks send [k | v], one tensor after the other.
struct Gathered {
  View k, v, exchanged;
  Gathered(const OpCall& c, Engine& e, const Sizes& s, LaunchContext& memory)
      : k(take(memory, DType::BF16, s.all, s.kv_width())), v(take(memory, DType::BF16, s.all, s.kv_width())),
        exchanged(take(memory, DType::BF16, 2 * s.all, s.kv_width())) {
    Communicator& group = c.group(Group::Cp);
    const View mine = rows_of(exchanged, group.rank() * 2 * s.local, 2 * s.local);
    copy(with_rows(c, c.in(1), s.local), rows_of(mine, 0, s.local), e);
    copy(with_rows(c, c.in(2), s.local), rows_of(mine, s.local, s.local), e);
    gather_rows(group, mine, exchanged, e);
    move(c, e, s, k, v, true);
  }
  // Between the order of the ranks and that of the tokens.
  void move(const OpCall& c, Engine& e, const Sizes& s, const View& keys, const View& values, bool to_tokens) const {
    for (std::int64_t r = 0; r < s.cp; ++r)
      for (const Stretch& x : stretches(*c.batch().shards, r))
        for (const View* v : {&keys, &values}) {
          const View there = rows_of(exchanged, (2 * r + (v == &values)) * s.local + x.local, x.count), token = rows_of(*v, x.token, x.count);
          copy(to_tokens ? there : token, to_tokens ? token : there, e);
        }
  }
};

// This rank's rows at their places among all tokens; `others` elsewhere.
View spread(const OpCall& c, Engine& e, const Sizes& s, const View& mine, float others, LaunchContext& memory) {
  const View all = take(memory, mine.dtype, s.all, mine.cols);
  kernels::fill({matrix(all), false}, others, e.launch());
  for (const Stretch& x : stretches(*c.batch().shards, c.group(Group::Cp).rank())) copy(rows_of(mine, x.local, x.count), rows_of(all, x.token, x.count), e);
  return all;
}
void collect(const OpCall& c, Engine& e, const View& all, const GradView& mine) {
  for (const Stretch& x : stretches(*c.batch().shards, c.group(Group::Cp).rank()))
    copy(rows_of(all, x.token, x.count), GradView{rows_of(mine.to, x.local, x.count), mine.accumulate}, e);
}

kernels::AttentionShape shape_of(const OpCall& c, Engine& e, const Sizes& s) {
  return {s.all, e.batch(c).sequences, s.heads, s.kv_heads, s.dim, e.batch(c).table};
}
View statistic_by_token(const View& statistic, const Sizes& s) { return {statistic.data, statistic.dtype, s.local, s.heads, s.heads}; }

} // namespace

// The kernel runs over the tiles of all tokens; queries of other ranks are zeros, and what they make is not read.
void gathered_attention_forward(const OpCall& c, Engine& e) {
  const Sizes s(c);
  LaunchContext memory = ranks_memory(c, e);
  const Gathered all(c, e, s, memory);
  const View q = spread(c, e, s, with_rows(c, c.in(0), s.local), 0, memory);
  const View o = take(memory, DType::BF16, s.all, s.q_width()), lse = take(memory, DType::FP32, s.all, s.heads);
  kernels::attention_forward({shape_of(c, e, s), matrix(q), matrix(all.k), matrix(all.v), matrix(o), data<float>(lse)}, e.launch());
  collect(c, e, o, {with_rows(c, c.out(0), s.local), false});
  collect(c, e, lse, {statistic_by_token(c.out(1), s), false});
}

// A query of another rank has the log-sum-exp infinity: its probabilities are 0, and so are its gradients.
void gathered_attention_backward(const OpCall& c, Engine& e) {
  const Sizes s(c);
  LaunchContext memory = ranks_memory(c, e);
  const Gathered all(c, e, s, memory);
  const View q = spread(c, e, s, with_rows(c, c.in(0), s.local), 0, memory), o = spread(c, e, s, with_rows(c, c.out(0), s.local), 0, memory);
  const View lse = spread(c, e, s, statistic_by_token(c.out(1), s), std::numeric_limits<float>::infinity(), memory);
  const View d_o = spread(c, e, s, with_rows(c, c.d_out(0), s.local), 0, memory), dq = take(memory, DType::BF16, s.all, s.q_width());
  const View dk = take(memory, DType::BF16, s.all, s.kv_width()), dv = take(memory, DType::BF16, s.all, s.kv_width());
  kernels::attention_backward({shape_of(c, e, s), matrix(q), matrix(all.k), matrix(all.v), matrix(o), data<float>(lse), matrix(d_o),
                               {matrix(dq), false}, {matrix(dk), false}, {matrix(dv), false}}, memory);
  collect(c, e, dq, with_rows(c, c.d_in(0), s.local));
  all.move(c, e, s, dk, dv, false);
  Communicator& group = c.group(Group::Cp);
  const View mine = rows_of(all.exchanged, group.rank() * 2 * s.local, 2 * s.local);
  group.reduce_scatter(all.exchanged.data, mine.data, mine.rows * mine.cols, mine.dtype);
  copy(rows_of(mine, 0, s.local), with_rows(c, c.d_in(1), s.local), e);
  copy(rows_of(mine, s.local, s.local), with_rows(c, c.d_in(2), s.local), e);
}

// --------------------------------------------------------------------------------- head slices ----

HeadSlice::HeadSlice(const OpCall& c, Engine& e, size_t parameter, std::vector<std::int64_t> sections, std::int64_t cols, LaunchContext& memory)
    : call_(c), engine_(e), parameter_(parameter), sections_(std::move(sections)), rows_(std::accumulate(sections_.begin(), sections_.end(), std::int64_t{0})),
      cols_(cols), ranks_(c.op().params[parameter].elements / (rows_ * cols)), memory_(memory) {
  const View whole = c.param(parameter, rows_ * ranks_, cols);
  if (ranks_ == 1) {
    value_ = whole;
    return;
  }
  value_ = take(memory_, whole.dtype, rows_, cols);
  for (size_t s = 0; s < sections_.size(); ++s) copy(part_of(whole, s), section_of(value_, s), e);
}

View HeadSlice::gradient() {
  whole_gradient_ = call_.param_grad(parameter_, rows_ * ranks_, cols_);
  if (ranks_ == 1 || !whole_gradient_) return whole_gradient_;
  gradient_ = take(memory_, whole_gradient_.dtype, rows_, cols_);
  kernels::fill({matrix(gradient_), false}, 0, engine_.launch());
  return gradient_;
}

void HeadSlice::finish() {
  if (!gradient_) return;
  for (size_t s = 0; s < sections_.size(); ++s) copy(section_of(gradient_, s), GradView{part_of(whole_gradient_, s), true}, engine_);
}

// This rank's rows of a section of the whole, and where they lie in its own.
View HeadSlice::part_of(const View& whole, size_t section) const {
  const std::int64_t before = std::accumulate(sections_.begin(), sections_.begin() + static_cast<std::ptrdiff_t>(section), std::int64_t{0});
  return rows_of(whole, before * ranks_ + call_.group(Group::Cp).rank() * sections_[section], sections_[section]);
}
View HeadSlice::section_of(const View& mine, size_t section) const {
  const std::int64_t before = std::accumulate(sections_.begin(), sections_.begin() + static_cast<std::ptrdiff_t>(section), std::int64_t{0});
  return rows_of(mine, before, sections_[section]);
}

} // namespace gdn::trainer::cuda
