#include "trainer/cpu/context.h"

#include <algorithm>
#include <numeric>

#include "reference/attention.h"
#include "trainer/comm/ranks.h"
#include "trainer/cpu/collectives.h"

namespace gdn::trainer::cpu {

namespace {

// ---------------------------------------------------------------------------- attention ----

struct Sizes {
  std::int64_t heads, kv_heads, dim, local, cp; // local: tokens of this rank
  DType dtype;
  Sizes(const model::OpList& list, const model::Op& op) {
    const auto& a = std::get<model::AttentionAttr>(op.attr);
    const model::Tensor& q = list.tensor(op.inputs[0]);
    heads = a.heads;
    kv_heads = a.kv_heads;
    dim = a.head_dim;
    local = q.elements() / (heads * dim);
    cp = op.collectives.empty() ? 1 : op.collectives[0].ranks;
    dtype = q.dtype;
  }
  std::int64_t width() const { return kv_heads * dim; }
};

// k and v of all tokens, in their order. Ranks send [k | v], one tensor after the other.
struct Gathered {
  View k, v;
  Gathered(const OpCall& c, const Sizes& s, std::span<std::byte>& scratch)
      : k(take(scratch, s.dtype, s.local * s.cp, s.width())), v(take(scratch, s.dtype, s.local * s.cp, s.width())) {
    std::span<std::byte> memory = scratch; // of the exchange alone
    const View all = take(memory, s.dtype, 2 * s.local * s.cp, s.width());
    Communicator& group = c.group(Group::Cp);
    const View mine{all.data + group.rank() * 2 * s.local * s.width() * size_of(s.dtype), s.dtype, 2 * s.local, s.width(), s.width()};
    View lower = mine;
    lower.rows = s.local;
    copy_view(with_rows(c, c.in(1), s.local), lower);
    lower.data += s.local * s.width() * size_of(s.dtype);
    copy_view(with_rows(c, c.in(2), s.local), lower);
    gather_rows(group, mine, all);
    move(c, s, all, true);
  }
  // Between the order of the ranks and that of the tokens.
  void move(const OpCall& c, const Sizes& s, const View& all, bool to_tokens) const {
    with_type(s.dtype, [&]<class T>() {
      const Mat<T> ranks = mat<T>(all);
      for (std::int64_t r = 0; r < s.cp; ++r)
        for (std::int64_t i = 0; i < s.local; ++i) {
          const std::int64_t t = c.batch().shards->tokens[static_cast<size_t>(r)][static_cast<size_t>(i)];
          for (const View* x : {&k, &v}) {
            T* token = mat<T>(*x).row(t);
            T* mine = ranks.row((2 * r + (x == &v)) * s.local + i);
            if (to_tokens) std::copy_n(mine, s.width(), token);
            else std::copy_n(token, s.width(), mine);
          }
        }
    });
  }
};

reference::AttentionShape shape_of(const Sizes& s) { return {s.heads, s.kv_heads, s.dim, 0}; }
reference::AttentionRows rows_here(const OpCall& c) { return {c.local_sequences(), c.batch().sequences, c.local_positions()}; }

} // namespace

Bytes gathered_attention_scratch(const model::OpList& list, const model::Op& op, int step) {
  const Sizes s(list, op);
  if (s.cp == 1) return 0;
  const Bytes one = round_up(s.local * s.cp * s.width() * size_of(s.dtype), 8), both = round_up(2 * s.local * s.cp * s.width() * size_of(s.dtype), 8);
  return 2 * one + both + (step < 0 ? 0 : 2 * one);
}

void gathered_attention_forward(const OpCall& c) {
  const Sizes s(c.list(), c.op());
  std::span<std::byte> scratch = c.scratch(gathered_attention_scratch(c.list(), c.op(), -1));
  const Gathered all(c, s, scratch);
  with_type(s.dtype, [&]<class T>() {
    reference::attention_forward<T>(shape_of(s), rows_here(c), mat<T>(with_rows(c, c.in(0), s.local)), mat<T>(all.k), mat<T>(all.v),
                                    mat<T>(with_rows(c, c.out(0), s.local)), values(c.out(1)));
  });
}

void gathered_attention_backward(const OpCall& c) {
  const Sizes s(c.list(), c.op());
  std::span<std::byte> scratch = c.scratch(gathered_attention_scratch(c.list(), c.op(), c.step()));
  const Gathered all(c, s, scratch);
  Gathered d = all; // gradients of all tokens, from this rank's queries
  d.k = take(scratch, s.dtype, all.k.rows, all.k.cols);
  d.v = take(scratch, s.dtype, all.v.rows, all.v.cols);
  with_type(s.dtype, [&]<class T>() {
    reference::AttentionBackward<T> p;
    p.q = mat<T>(with_rows(c, c.in(0), s.local));
    p.k = mat<T>(all.k);
    p.v = mat<T>(all.v);
    p.o = mat<T>(with_rows(c, c.out(0), s.local));
    p.lse = values(c.out(1));
    p.d_o = mat<T>(with_rows(c, c.d_out(0), s.local));
    p.dq = grad<T>(with_rows(c, c.d_in(0), s.local));
    p.dk = reference::Grad<T>(mat<T>(d.k));
    p.dv = reference::Grad<T>(mat<T>(d.v));
    reference::attention_backward<T>(shape_of(s), rows_here(c), p);
  });
  const View ranks = take(scratch, s.dtype, 2 * s.local * s.cp, s.width());
  d.move(c, s, ranks, false);
  Communicator& group = c.group(Group::Cp);
  View mine{ranks.data + group.rank() * 2 * s.local * s.width() * size_of(s.dtype), s.dtype, s.local, s.width(), s.width()};
  group.reduce_scatter(ranks.data, mine.data, 2 * s.local * s.width(), s.dtype);
  copy_view(mine, with_rows(c, c.d_in(1), s.local));
  mine.data += s.local * s.width() * size_of(s.dtype);
  copy_view(mine, with_rows(c, c.d_in(2), s.local));
}

// ------------------------------------------------------------------------- head slices ----

Bytes HeadSlice::scratch_bytes(const model::Op& op, size_t parameter, std::int64_t rows, std::int64_t cols, int step) {
  const model::ParamRef& p = op.params[parameter];
  if (p.elements == rows * cols) return 0;
  return round_up(rows * cols * size_of(p.dtype), 8) + (step < 0 ? 0 : round_up(rows * cols * 4, 8));
}

HeadSlice::HeadSlice(const OpCall& c, size_t parameter, std::vector<std::int64_t> sections, std::int64_t cols, std::span<std::byte>& scratch)
    : call_(c), parameter_(parameter), sections_(std::move(sections)), rows_(std::accumulate(sections_.begin(), sections_.end(), std::int64_t{0})),
      cols_(cols), ranks_(c.op().params[parameter].elements / (rows_ * cols)), scratch_(scratch) {
  const View whole = c.param(parameter, rows_ * ranks_, cols);
  if (ranks_ == 1) {
    value_ = whole;
    return;
  }
  value_ = take(scratch_, whole.dtype, rows_, cols);
  for (size_t s = 0; s < sections_.size(); ++s) copy_view(part_of(whole, s), section_of(value_, s));
}

View HeadSlice::gradient() {
  whole_gradient_ = call_.param_grad(parameter_, rows_ * ranks_, cols_);
  if (ranks_ == 1 || !whole_gradient_) return whole_gradient_;
  gradient_ = take(scratch_, whole_gradient_.dtype, rows_, cols_);
  std::fill_n(gradient_.data, rows_ * cols_ * size_of(gradient_.dtype), std::byte{0});
  return gradient_;
}

void HeadSlice::finish() {
  if (!gradient_) return;
  for (size_t s = 0; s < sections_.size(); ++s) copy_view(section_of(gradient_, s), GradView{part_of(whole_gradient_, s), true});
}

// This rank's rows of a section of the whole, and where they lie in its own.
View HeadSlice::part_of(const View& whole, size_t section) const {
  const std::int64_t before = std::accumulate(sections_.begin(), sections_.begin() + static_cast<std::ptrdiff_t>(section), std::int64_t{0});
  const std::int64_t first = before * ranks_ + call_.group(Group::Cp).rank() * sections_[section];
  return {whole.data + first * cols_ * size_of(whole.dtype), whole.dtype, sections_[section], cols_, cols_};
}
View HeadSlice::section_of(const View& mine, size_t section) const {
  const std::int64_t before = std::accumulate(sections_.begin(), sections_.begin() + static_cast<std::ptrdiff_t>(section), std::int64_t{0});
  return {mine.data + before * cols_ * size_of(mine.dtype), mine.dtype, sections_[section], cols_, cols_};
}

} // namespace gdn::trainer::cpu
