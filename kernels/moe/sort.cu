// A CTA an expert reads all slots in order: E T k loads that stay in L2, and no order to go wrong.
#include "kernels/common/matrix.cuh"
#include "kernels/moe/sort.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

// Element s of a matrix counted row by row; there are fewer than 2^32.
__device__ __forceinline__ std::int64_t slot_index(const Matrix& m, std::int64_t s) {
  const auto cols = static_cast<std::uint32_t>(m.cols), slot = static_cast<std::uint32_t>(s), row = slot / cols;
  return load_index(m, row, slot - row * cols);
}

__global__ void __launch_bounds__(kThreads) count_kernel(Matrix experts, std::int32_t* counts) {
  __shared__ int sums[kThreads / 32];
  const std::int64_t slots = experts.rows * experts.cols;
  int mine = 0;
#pragma unroll 4
  for (std::int64_t s = threadIdx.x; s < slots; s += kThreads)
    mine += slot_index(experts, s) == blockIdx.x;
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int total = 0;
  for (int sum : sums) total += sum;
  counts[blockIdx.x] = total;
}

// One CTA of 1024 threads.
__global__ void __launch_bounds__(1024) offsets_kernel(const std::int32_t* counts, int experts, std::int64_t capacity, std::int32_t* offsets) {
  __shared__ int sums[1024];
  const int e = threadIdx.x;
  const int mine = e >= experts ? 0 : capacity > 0 ? static_cast<int>(capacity) : counts[e];
  sums[e] = mine;
  for (int step = 1; step < 1024; step *= 2) {
    __syncthreads();
    const int other = e >= step ? sums[e - step] : 0;
    __syncthreads();
    sums[e] += other;
  }
  if (e < experts) offsets[e + 1] = sums[e];
  if (e == 0) offsets[0] = 0;
}

__global__ void __launch_bounds__(kThreads)
    assign_kernel(Matrix experts, std::int64_t capacity, const std::int32_t* offsets, Matrix row_map) {
  __shared__ int sums[2][kThreads / 32]; // of each warp; two, so that one barrier a round is enough
  const std::int64_t slots = experts.rows * experts.cols, first = offsets[blockIdx.x];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::int64_t rank = 0; // slots of this expert before the round
  int which = 0;
  std::int64_t next = threadIdx.x < slots ? slot_index(experts, threadIdx.x) : -1;
  for (std::int64_t base = 0; base < slots; base += kThreads, which ^= 1) {
    const std::int64_t s = base + threadIdx.x;
    const bool here = s < slots && next == blockIdx.x;
    if (s + kThreads < slots) next = slot_index(experts, s + kThreads);
    const unsigned votes = __ballot_sync(~0u, here);
    if (lane == 0) sums[which][warp] = __popc(votes);
    __syncthreads();
    int before = 0, round = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += sums[which][w];
      round += sums[which][w];
    }
    if (here) {
      const std::int64_t mine = rank + before + __popc(votes & ((1u << lane) - 1));
      store_index(row_map, s / experts.cols, s % experts.cols, capacity > 0 && mine >= capacity ? -1 : first + mine);
    }
    rank += round;
  }
}

__global__ void __launch_bounds__(kThreads) add_counts_kernel(const std::int32_t* from, int count, std::int64_t* to) {
  const int e = blockIdx.x * kThreads + threadIdx.x;
  if (e < count) to[e] += from[e];
}

// A warp a token.
__global__ void __launch_bounds__(kThreads) experts_of_map_kernel(Matrix map, Matrix experts) {
  const std::int64_t t = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (t >= map.rows) return;
  int found = 0;
  for (int first = 0; first < map.cols; first += 32) {
    const int e = first + lane;
    const bool chosen = e < map.cols && load_index(map, t, e) != 0;
    const unsigned votes = __ballot_sync(~0u, chosen);
    const int place = found + __popc(votes & ((1u << lane) - 1));
    if (chosen && place < experts.cols) store_index(experts, t, place, e);
    found += __popc(votes);
  }
}

struct CopyIndicesParams {
  Matrix from, to;
};
template <int N>
struct CopyIndices {
  CopyIndicesParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    store_index(p.to, r, c, c < p.from.cols ? load_index(p.from, r, c) : 0);
  }
};

struct ToRowsParams {
  Matrix row_map, by_slot, dense, experts, by_row;
};
template <int N>
struct ToRows { // over slots
  ToRowsParams p;
  __device__ void operator()(std::int64_t t, std::int64_t j) const {
    const std::int64_t row = load_index(p.row_map, t, j);
    if (row < 0) return;
    store_value(p.by_row, row, 0, p.by_slot.data ? load_value(p.by_slot, t, j) : load_value(p.dense, t, load_index(p.experts, t, j)));
  }
};

struct FromRowsParams {
  Matrix row_map, by_row;
  Gradient by_slot;
};
template <int N>
struct FromRows {
  FromRowsParams p;
  __device__ void operator()(std::int64_t t, std::int64_t j) const {
    const std::int64_t row = load_index(p.row_map, t, j);
    put_value(p.by_slot, t, j, row < 0 ? 0.0f : load_value(p.by_row, row, 0));
  }
};

struct FromRowsDenseParams {
  Matrix row_map, by_row, experts;
  const std::int32_t* offsets;
  Gradient dense;
  std::int64_t top_k;
};
template <int N>
struct FromRowsDense { // over experts
  FromRowsDenseParams p;
  __device__ void operator()(std::int64_t t, std::int64_t e) const {
    float value = 0.0f;
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const std::int64_t row = load_index(p.row_map, t, j);
      const bool mine = p.experts.data ? load_index(p.experts, t, j) == e : row >= p.offsets[e] && row < p.offsets[e + 1];
      if (mine && row >= 0) value = load_value(p.by_row, row, 0);
    }
    put_value(p.dense, t, e, value);
  }
};

Matrix slots_of(const Matrix& row_map, std::int64_t k) {
  Matrix m = row_map;
  m.cols = k;
  return m;
}

} // namespace

void count_slots(const Matrix& experts, int count, std::int32_t* counts, const LaunchContext& context) {
  count_kernel<<<static_cast<unsigned>(count), kThreads, 0, context.stream>>>(experts, counts);
  check_launch("count_kernel");
}

void add_counts(const std::int32_t* from, int count, std::int64_t* to, const LaunchContext& context) {
  add_counts_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(from, count, to);
  check_launch("add_counts_kernel");
}

void sort_slots(const SortParams& p, const LaunchContext& context) {
  if (p.count < 1 || p.count > 1024) refuse("sort_slots", {{"experts", p.count}}, "1 to 1024 experts");
  count_slots(p.experts, p.count, p.counts, context);
  offsets_kernel<<<1, 1024, 0, context.stream>>>(p.counts, p.count, p.capacity, p.offsets);
  check_launch("offsets_kernel");
  assign_kernel<<<static_cast<unsigned>(p.count), kThreads, 0, context.stream>>>(p.experts, p.capacity, p.offsets, p.row_map);
  check_launch("assign_kernel");
}

void experts_of_map(const Matrix& map, const Matrix& experts, const LaunchContext& context) {
  if (map.rows == 0) return;
  experts_of_map_kernel<<<static_cast<unsigned>((map.rows * 32 + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(map, experts);
  check_launch("experts_of_map_kernel");
}

void copy_indices(const Matrix& from, const Matrix& to, const LaunchContext& context) {
  for_rows<CopyIndices>(CopyIndicesParams{from, to}, to.rows, to.cols, false, context, "copy_indices");
}

void weights_to_rows(const Matrix& row_map, const Matrix& by_slot, const Matrix& dense, const Matrix& experts,
                     const Matrix& by_row, const LaunchContext& context) {
  const std::int64_t k = by_slot.data ? by_slot.cols : experts.cols;
  for_rows<ToRows>(ToRowsParams{slots_of(row_map, k), by_slot, dense, experts, by_row}, row_map.rows, k, false, context, "weights_to_rows");
}
void weights_from_rows(const Matrix& row_map, const Matrix& by_row, const Gradient& by_slot, const LaunchContext& context) {
  for_rows<FromRows>(FromRowsParams{row_map, by_row, by_slot}, row_map.rows, by_slot.to.cols, false, context, "weights_from_rows");
}
void weights_from_rows_dense(const Matrix& row_map, const Matrix& by_row, const Matrix& experts, const std::int32_t* offsets,
                             const Gradient& dense, const LaunchContext& context) {
  for_rows<FromRowsDense>(FromRowsDenseParams{row_map, by_row, experts, offsets, dense, row_map.cols}, row_map.rows, dense.to.cols,
                          false, context, "weights_from_rows_dense");
}

} // namespace gdn::kernels
