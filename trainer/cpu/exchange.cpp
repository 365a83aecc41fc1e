#include <algorithm>

#include "model/qkv_layout.h"
#include "trainer/comm/ranks.h"
#include "trainer/cpu/collectives.h"
#include "trainer/token_heads.h"

// Ops that do nothing but exchange: tokens for heads, columns, rows, counts.
namespace gdn::trainer::cpu {

namespace {

// ------------------------------------------------------------------- tokens <-> heads (CP) ----

template <class T> void store(const T* from, T* to, std::int64_t n, bool accumulate) {
  for (std::int64_t j = 0; j < n; ++j) to[j] = accumulate ? static_cast<T>(static_cast<Acc<T>>(to[j]) + static_cast<Acc<T>>(from[j])) : from[j];
}

// `local` [tokens of this rank, columns], `whole` [all tokens, width]; one is read, the other written.
template <class T>
void exchange(const TokenHeads& x, const View& local, const View& whole, bool to_heads, bool accumulate, std::span<std::byte> scratch) {
  const View sent = take(scratch, local.dtype, local.rows * x.ranks, x.width), received = take(scratch, local.dtype, local.rows * x.ranks, x.width);
  auto tokens = [&](std::int64_t r) -> const std::vector<std::int64_t>& { return x.shards.tokens[static_cast<size_t>(r)]; };
  // Per peer [tokens of the rank on the token side, width].
  auto block = [&](const View& v, std::int64_t r) { return mat<T>(View{v.data + r * local.rows * x.width * size_of(v.dtype), v.dtype, local.rows, x.width, x.width}); };
  const Mat<T> mine = mat<T>(local), all = mat<T>(whole);
  std::vector<Part> to, from;
  for (std::int64_t r = 0; r < x.ranks; ++r) {
    const Mat<T> b = block(sent, r);
    if (to_heads)
      for (std::int64_t i = 0; i < local.rows; ++i)
        x.for_parts(r, [&](std::int64_t column, std::int64_t head, std::int64_t n) { std::copy_n(mine.row(i) + column, n, b.row(i) + head); });
    else
      for (std::int64_t i = 0; i < local.rows; ++i) std::copy_n(all.row(tokens(r)[static_cast<size_t>(i)]), x.width, b.row(i));
    const Bytes bytes = local.rows * x.width * size_of(local.dtype);
    to.push_back({sent.data + r * bytes, bytes});
    from.push_back({received.data + r * bytes, bytes});
  }
  x.group.all_to_all(to, from);
  for (std::int64_t r = 0; r < x.ranks; ++r) {
    const Mat<T> b = block(received, r);
    for (std::int64_t i = 0; i < local.rows; ++i)
      if (to_heads) store(b.row(i), all.row(tokens(r)[static_cast<size_t>(i)]), x.width, accumulate);
      else x.for_parts(r, [&](std::int64_t column, std::int64_t head, std::int64_t n) { store(b.row(i) + head, mine.row(i) + column, n, accumulate); });
  }
}

Bytes heads_scratch(const model::OpList& list, const model::Op& op, int) { return 2 * round_up(list.tensor(op.inputs[0]).bytes(), 8); }

void heads_run(const OpCall& c, const View& from, const GradView& to, bool to_heads) {
  const View in = as_tokens(c, from, to_heads), out = as_tokens(c, to.to, !to_heads);
  const TokenHeads x(c, to_heads ? in.cols : out.cols);
  with_type(in.dtype, [&]<class T>() {
    exchange<T>(x, to_heads ? in : out, to_heads ? out : in, to_heads, to.accumulate, c.scratch(heads_scratch(c.list(), c.op(), c.step())));
  });
}
void heads_forward(const OpCall& c) { heads_run(c, c.in(0), {c.out(0), false}, to_heads(c)); }
void heads_backward(const OpCall& c) { heads_run(c, c.d_out(0), c.d_in(0), !to_heads(c)); }

// ------------------------------------------------------------------------- columns and rows ----

// Columns of all TP ranks side by side.
Bytes columns_scratch(const model::OpList& list, const model::Op& op, int step) {
  const bool moves = step < 0 || !op.steps[static_cast<size_t>(step)].collectives.empty();
  return moves ? round_up(list.tensor(op.outputs[0]).bytes(), 8) : 0;
}
// Between the blocks of the ranks, one below the other, and the gathered columns.
template <class F> void for_columns(const OpCall& c, const View& blocks, const View& all, F&& f) {
  const std::vector<std::int64_t> order = model::order_of_gathered(std::get_if<model::SharedGroupAttr>(&c.op().attr), all.cols, c.group(Group::Tp).rank());
  for (std::int64_t i = 0; i < all.rows; ++i)
    for (std::int64_t j = 0; j < all.cols; ++j) {
      const std::int64_t from = order[static_cast<size_t>(j)];
      f(from / blocks.cols * all.rows + i, from % blocks.cols, i, j);
    }
}

void columns_forward(const OpCall& c) {
  const View x = c.in(0), y = c.out(0);
  Communicator& group = c.group(Group::Tp);
  std::span<std::byte> scratch = c.scratch(columns_scratch(c.list(), c.op(), -1));
  const View blocks = take(scratch, x.dtype, x.rows * group.size(), x.cols);
  gather_rows(group, x, blocks);
  with_type(x.dtype, [&]<class T>() {
    for_columns(c, blocks, y, [&](std::int64_t row, std::int64_t column, std::int64_t i, std::int64_t j) { mat<T>(y).row(i)[j] = mat<T>(blocks).row(row)[column]; });
  });
}
void columns_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  const GradView dx = c.d_in(0);
  Communicator& group = c.group(Group::Tp);
  if (c.backward_step().collectives.empty()) {
    const std::int64_t mine = group.rank() * dx.to.cols;
    return copy_view({dy.data + mine * size_of(dy.dtype), dy.dtype, dy.rows, dx.to.cols, dy.stride}, dx);
  }
  std::span<std::byte> scratch = c.scratch(columns_scratch(c.list(), c.op(), c.step()));
  const View blocks = take(scratch, dy.dtype, dy.rows * group.size(), dx.to.cols);
  with_type(dy.dtype, [&]<class T>() {
    for_columns(c, blocks, dy, [&](std::int64_t row, std::int64_t column, std::int64_t i, std::int64_t j) { mat<T>(blocks).row(row)[column] = mat<T>(dy).row(i)[j]; });
  });
  scatter_sum(group, blocks, dx);
}

// This TP rank's rows of what all hold.
Bytes rows_scratch(const model::OpList& list, const model::Op& op, int step) { return step < 0 ? 0 : round_up(list.tensor(op.inputs[0]).bytes(), 8); }
void rows_forward(const OpCall& c) {
  const View y = c.out(0);
  copy_view(rows_of(c.in(0), c.group(Group::Tp).rank() * y.rows, y.rows), y);
}
void rows_backward(const OpCall& c) {
  const View dy = c.d_out(0);
  std::span<std::byte> scratch = c.scratch(rows_scratch(c.list(), c.op(), c.step()));
  Communicator& group = c.group(Group::Tp);
  const View all = take(scratch, dy.dtype, dy.rows * group.size(), dy.cols);
  gather_rows(group, dy, all);
  copy_view(all, c.d_in(0));
}

// A statistic, summed over one group after the other.
void sum_forward(const OpCall& c) {
  const View x = c.in(0), y = c.out(0);
  std::copy_n(x.data, x.rows * x.cols * size_of(x.dtype), y.data);
  for (const model::Collective& sum : c.op().collectives) reduce(c.group(sum.group), y);
}

} // namespace

std::span<const Entry> exchange_ops() {
  static const Entry ops[] = {
      {model::OpKind::AllToAll, {heads_forward, heads_backward, heads_scratch}},
      {model::OpKind::AllGather, {columns_forward, columns_backward, columns_scratch}},
      {model::OpKind::ReduceScatter, {rows_forward, rows_backward, rows_scratch}},
      {model::OpKind::AllReduce, {sum_forward, nullptr}},
  };
  return ops;
}

} // namespace gdn::trainer::cpu
