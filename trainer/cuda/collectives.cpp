#include "trainer/cuda/collectives.h"

#include <algorithm>

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "kernels/common/check.h"
#include "kernels/common/elementwise.h"
#include "kernels/describe/own.h"
#include "kernels/describe/ranks.h"
#include "model/qkv_layout.h"
#include "trainer/comm/ranks.h"
#include "trainer/token_heads.h"

namespace gdn::trainer::cuda {

LaunchContext ranks_memory(const OpCall& c, const Engine& e) {
  const Bytes more = kernels::ranks_scratch(c.list(), c.op(), c.step());
  if (more == 0) return e.launch();
  LaunchContext memory = e.launch(c);
  const Bytes first = memory.scratch_bytes - more;
  memory.scratch = static_cast<char*>(memory.scratch) + first;
  memory.scratch_bytes = more;
  return memory;
}

View take(LaunchContext& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  const Bytes bytes = round_up(rows * cols * size_of(dtype), 256);
  if (memory.scratch_bytes < bytes) throw Error(ErrorCode::Internal, fmt::format("an op asks for {} bytes of scratch, {} are left", bytes, memory.scratch_bytes));
  return {static_cast<std::byte*>(take(memory, bytes)), dtype, rows, cols, cols};
}

void copy(const View& from, const GradView& to, Engine& e) {
  if (from.rows * from.cols > 0) kernels::copy(matrix(from), gradient(to), e.launch());
}

View rows_of(const View& v, std::int64_t first, std::int64_t rows) {
  return {v.data + first * v.stride * size_of(v.dtype), v.dtype, rows, v.cols, v.stride};
}
View columns_of(const View& v, std::int64_t first, std::int64_t columns) {
  return {v.data + first * size_of(v.dtype), v.dtype, v.rows, columns, v.stride};
}
Part part_of(const View& v) { return {v.data, v.rows * v.cols * size_of(v.dtype)}; }

void gather_rows(Communicator& group, const View& mine, const View& all, Engine& e) {
  const bool dense = mine.rows <= 1 || mine.stride == mine.cols;
  const View place = rows_of(all, group.rank() * mine.rows, mine.rows);
  if (!dense) copy(mine, place, e);
  group.all_gather(dense ? mine.data : place.data, all.data, part_of(mine).bytes);
}

void scatter_sum(Communicator& group, const View& all, const GradView& mine, Engine& e) {
  const std::int64_t rows = all.rows / group.size();
  const bool direct = !mine.accumulate && mine.to.dtype == all.dtype && (mine.to.rows <= 1 || mine.to.stride == mine.to.cols);
  const View sum = direct ? mine.to : rows_of(all, group.rank() * rows, rows);
  group.reduce_scatter(all.data, sum.data, rows * all.cols, all.dtype);
  if (!direct) copy(sum, mine, e);
}

void reduce(Communicator& group, const View& v, Reduction reduction) {
  if (v.rows > 1 && v.stride != v.cols) throw Error(ErrorCode::Internal, "a strided matrix is summed over ranks");
  group.all_reduce(v.data, v.rows * v.cols, v.dtype, reduction);
}

std::int64_t token_shards(const OpCall& c) { return c.context().ranks ? c.context().ranks->token_shards() : 1; }

bool is_first_token_shard(const OpCall& c) {
  const Ranks* ranks = c.context().ranks;
  return !ranks || (ranks->place().cp == 0 && (!ranks->sequence_parallel() || ranks->place().tp == 0));
}

std::vector<Stretch> stretches(const TokenShards& shards, std::int64_t rank) {
  std::vector<Stretch> out;
  std::int64_t local = 0;
  for (std::int64_t token : shards.tokens[static_cast<size_t>(rank)]) {
    if (!out.empty() && out.back().token + out.back().count == token) ++out.back().count;
    else out.push_back({local, token, 1});
    ++local;
  }
  return out;
}

namespace {

// ------------------------------------------------------------------- tokens <-> heads (CP) ----

// `local` [tokens of this rank, columns], `whole` [all tokens, width]; one is read, the other written.
void exchange(const OpCall& c, Engine& e, const View& local, const View& whole, bool to_heads, bool accumulate) {
  const TokenHeads x(c, local.cols);
  // Blocks [tokens of the rank on the token side, width], a peer's after another's.
  const View sent{static_cast<std::byte*>(e.launch(c).scratch), local.dtype, local.rows * x.ranks, x.width, x.width};
  View received = sent;
  received.data += part_of(sent).bytes;
  std::vector<Part> to, from;
  for (std::int64_t r = 0; r < x.ranks; ++r) {
    const View block = rows_of(sent, r * local.rows, local.rows);
    if (to_heads) x.for_parts(r, [&](std::int64_t column, std::int64_t head, std::int64_t n) { copy(columns_of(local, column, n), columns_of(block, head, n), e); });
    else
      for (const Stretch& s : stretches(x.shards, r)) copy(rows_of(whole, s.token, s.count), rows_of(block, s.local, s.count), e);
    to.push_back(part_of(block));
    from.push_back(part_of(rows_of(received, r * local.rows, local.rows)));
  }
  x.group.all_to_all(to, from);
  for (std::int64_t r = 0; r < x.ranks; ++r) {
    const View block = rows_of(received, r * local.rows, local.rows);
    if (to_heads)
      for (const Stretch& s : stretches(x.shards, r)) copy(rows_of(block, s.local, s.count), GradView{rows_of(whole, s.token, s.count), accumulate}, e);
    else
      x.for_parts(r, [&](std::int64_t column, std::int64_t head, std::int64_t n) {
        copy(columns_of(block, head, n), GradView{columns_of(local, column, n), accumulate}, e);
      });
  }
}

void heads_run(const OpCall& c, Engine& e, const View& from, const GradView& to, bool to_heads) {
  const View in = as_tokens(c, from, to_heads), out = as_tokens(c, to.to, !to_heads);
  exchange(c, e, to_heads ? in : out, to_heads ? out : in, to_heads, to.accumulate);
}
void heads_forward(const OpCall& c, Engine& e) { heads_run(c, e, c.in(0), {c.out(0), false}, to_heads(c)); }
void heads_backward(const OpCall& c, Engine& e) { heads_run(c, e, c.d_out(0), c.d_in(0), !to_heads(c)); }

// ------------------------------------------------------------------------- columns and rows ----

// Calls f(first column of the gathered ones, rank and column there, columns) for neighbours that stay neighbours.
template <class F> void for_columns(const OpCall& c, std::int64_t columns, std::int64_t own, std::int64_t rank, F&& f) {
  const std::vector<std::int64_t> order = model::order_of_gathered(std::get_if<model::SharedGroupAttr>(&c.op().attr), columns, rank);
  for (size_t first = 0; first < order.size();) {
    size_t end = first + 1;
    while (end < order.size() && order[end] == order[end - 1] + 1 && order[end] / own == order[first] / own) ++end;
    f(static_cast<std::int64_t>(first), order[first] / own, order[first] % own, static_cast<std::int64_t>(end - first));
    first = end;
  }
}

// Columns of all TP ranks side by side.
void columns_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), y = c.out(0);
  Communicator& group = c.group(Group::Tp);
  LaunchContext memory = e.launch(c);
  const View blocks{static_cast<std::byte*>(memory.scratch), x.dtype, x.rows * group.size(), x.cols, x.cols};
  gather_rows(group, x, blocks, e);
  for_columns(c, y.cols, x.cols, group.rank(), [&](std::int64_t to, std::int64_t rank, std::int64_t column, std::int64_t n) {
    copy(columns_of(rows_of(blocks, rank * x.rows, x.rows), column, n), columns_of(y, to, n), e);
  });
}
void columns_backward(const OpCall& c, Engine& e) {
  const View dy = c.d_out(0);
  const GradView dx = c.d_in(0);
  Communicator& group = c.group(Group::Tp);
  const std::int64_t own = dx.to.cols;
  if (c.backward_step().collectives.empty()) // nobody else contributed
    return for_columns(c, dy.cols, own, group.rank(), [&](std::int64_t from, std::int64_t rank, std::int64_t column, std::int64_t n) {
      if (rank == group.rank()) copy(columns_of(dy, from, n), GradView{columns_of(dx.to, column, n), dx.accumulate}, e);
    });
  LaunchContext memory = e.launch(c);
  const View blocks{static_cast<std::byte*>(memory.scratch), dy.dtype, dy.rows * group.size(), own, own};
  for_columns(c, dy.cols, own, group.rank(), [&](std::int64_t from, std::int64_t rank, std::int64_t column, std::int64_t n) {
    copy(columns_of(dy, from, n), columns_of(rows_of(blocks, rank * dy.rows, dy.rows), column, n), e);
  });
  scatter_sum(group, blocks, dx, e);
}

// This TP rank's rows of what all hold.
void rows_forward(const OpCall& c, Engine& e) {
  const View y = c.out(0);
  copy(rows_of(c.in(0), c.group(Group::Tp).rank() * y.rows, y.rows), y, e);
}
void rows_backward(const OpCall& c, Engine& e) {
  const View dy = c.d_out(0);
  Communicator& group = c.group(Group::Tp);
  LaunchContext memory = ranks_memory(c, e);
  const View all = take(memory, dy.dtype, dy.rows * group.size(), dy.cols);
  gather_rows(group, dy, all, e);
  copy(all, c.d_in(0), e);
}

// A statistic, summed over one group after the other.
void sum_forward(const OpCall& c, Engine& e) {
  const View x = c.in(0), y = c.out(0);
  GDN_CUDA(cudaMemcpyAsync(y.data, x.data, static_cast<size_t>(part_of(y).bytes), cudaMemcpyDeviceToDevice, e.stream));
  for (const model::Collective& sum : c.op().collectives) reduce(c.group(sum.group), y);
}

} // namespace

std::span<const Entry> exchange_ops() {
  static const Entry ops[] = {
      {model::OpKind::AllToAll, {heads_forward, heads_backward}},
      {model::OpKind::AllGather, {columns_forward, columns_backward}},
      {model::OpKind::ReduceScatter, {rows_forward, rows_backward}},
      {model::OpKind::AllReduce, {sum_forward, nullptr}},
  };
  return ops;
}

} // namespace gdn::trainer::cuda
