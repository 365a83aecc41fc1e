#include "kernels/loss/embedding.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    shift_kernel(const std::int64_t* from, const std::int32_t* positions, std::int64_t shift, std::int64_t outside, Matrix to) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x, at = t + shift;
  if (t >= to.rows) return;
  const bool inside = at < to.rows && positions[at] == positions[t] + shift;
  store_index(to, t, 0, inside ? from[at] : outside);
}

// Ids outside the table's rows, which another rank has: rows of zeros, and nothing to add.
__device__ __forceinline__ bool inside(std::int64_t id, const Matrix& table) { return id >= 0 && id < table.rows; }

struct LookUpParams {
  Matrix ids, table, y;
};
template <int N>
struct LookUp {
  LookUpParams p;
  __device__ void operator()(std::int64_t t, std::int64_t c) const {
    const std::int64_t id = load_index(p.ids, t, 0);
    store_values<N>(p.y, t, c, inside(id, p.table) ? load_values<N>(p.table, id, c) : Values<N>{});
  }
};

// order[i] = the token at place i when tokens are sorted by id, then by place.
__global__ void __launch_bounds__(kThreads) order_kernel(Matrix ids, std::int32_t* order) {
  __shared__ std::int32_t tile[kThreads];
  const std::int64_t n = ids.rows, t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  const std::int32_t mine = t < n ? static_cast<std::int32_t>(load_index(ids, t, 0)) : 0;
  std::int32_t rank = 0;
  for (std::int64_t base = 0; base < n; base += kThreads) {
    __syncthreads();
    if (base + threadIdx.x < n) tile[threadIdx.x] = static_cast<std::int32_t>(load_index(ids, base + threadIdx.x, 0));
    __syncthreads();
    const int count = static_cast<int>(min(std::int64_t{kThreads}, n - base));
#pragma unroll 8
    for (int i = 0; i < count; ++i) rank += tile[i] < mine || (tile[i] == mine && base + i < t);
  }
  if (t < n) order[rank] = static_cast<std::int32_t>(t);
}

// The CTA of an id's first token adds the rows of all its tokens; 256 N columns a CTA.
template <int N>
__global__ void __launch_bounds__(kThreads) table_kernel(Matrix ids, Matrix dy, const std::int32_t* order, Matrix d_table) {
  const std::int64_t n = ids.rows, first = blockIdx.x;
  const std::int64_t id = load_index(ids, order[first], 0);
  if (!inside(id, d_table) || (first > 0 && load_index(ids, order[first - 1], 0) == id)) return;
  const std::int64_t c = (blockIdx.y * std::int64_t{kThreads} + threadIdx.x) * N;
  if (c >= dy.cols) return;
  Values<N> sum = load_values<N>(d_table, id, c);
  for (std::int64_t i = first; i < n; ++i) {
    const std::int64_t t = order[i];
    if (load_index(ids, t, 0) != id) break;
    const Values<N> d = load_values<N>(dy, t, c);
#pragma unroll
    for (int j = 0; j < N; ++j) sum.x[j] += d.x[j];
  }
  store_values<N>(d_table, id, c, sum);
}

} // namespace

void shift_tokens(const std::int64_t* from, const std::int32_t* positions, std::int64_t shift, std::int64_t outside, const Matrix& to,
                  const LaunchContext& context) {
  if (to.rows == 0) return;
  shift_kernel<<<static_cast<unsigned>((to.rows + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(from, positions, shift, outside, to);
  check_launch("shift_kernel");
}

void embedding_forward(const Matrix& ids, const Matrix& table, const Matrix& y, const LaunchContext& context) {
  for_rows<LookUp>(LookUpParams{ids, table, y}, y.rows, y.cols, vector_matrices({table, y}), context, "embedding_forward");
}

void embedding_backward(const Matrix& ids, const Matrix& dy, const Matrix& d_table, const LaunchContext& context) {
  require_scratch(context, embedding_backward_scratch(ids.rows), "embedding_backward");
  if (ids.rows == 0) return;
  auto* order = static_cast<std::int32_t*>(context.scratch);
  order_kernel<<<static_cast<unsigned>((ids.rows + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(ids, order);
  check_launch("order_kernel");
  const bool vector = vector_matrices({dy, d_table});
  const std::int64_t width = kThreads * (vector ? 8 : 1);
  const dim3 grid(static_cast<unsigned>(ids.rows), static_cast<unsigned>((dy.cols + width - 1) / width));
  (vector ? table_kernel<8> : table_kernel<1>)<<<grid, kThreads, 0, context.stream>>>(ids, dy, order, d_table);
  check_launch("table_kernel");
}

} // namespace gdn::kernels
