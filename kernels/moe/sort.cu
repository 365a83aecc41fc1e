// Slots are counted and placed by one cluster of CTAs, without atomics: an order that cannot go wrong, and no scratch.
#include <cooperative_groups.h>

#include "kernels/common/matrix.cuh"
#include "kernels/moe/sort.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256, kMaxSorted = 1024;

// Element s of a matrix counted row by row; there are fewer than 2^32.
__device__ __forceinline__ std::int64_t slot_index(const Matrix& m, std::int64_t s) {
  const auto cols = static_cast<std::uint32_t>(m.cols), slot = static_cast<std::uint32_t>(s), row = slot / cols;
  return load_index(m, row, slot - row * cols);
}

constexpr int kCtas = 8, kWarps = 32; // of the cluster that sorts

// f(slot, expert, lanes with that expert) for slots first .. last in order, 32 at a time; expert -1: none.
template <class F>
__device__ __forceinline__ void for_slots(const Matrix& experts, int count, std::int64_t first, std::int64_t last, F f) {
  constexpr int kAhead = 8; // loads in flight
  for (std::int64_t base = first; base < last; base += 32 * kAhead) {
    int expert[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t s = base + 32 * i + threadIdx.x % 32;
      const std::int64_t e = s < last ? slot_index(experts, s) : -1;
      expert[i] = e < count ? static_cast<int>(e) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) f(base + 32 * i + threadIdx.x % 32, expert[i], __match_any_sync(~0u, expert[i]));
  }
}

// One cluster. Every warp has a run of slots; it counts them, learns how many of each expert lie in the runs before, and
// walks its run again. Without a row map: counts only.
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(32 * kWarps, 1)
    sort_kernel(Matrix experts, int count, std::int64_t capacity, std::int32_t* counts, std::int32_t* offsets, Matrix row_map) {
  extern __shared__ std::int32_t seen[]; // [warps][experts]: slots of the expert in the CTA's warps before, and so far in this one
  __shared__ std::int32_t of_cta[kMaxSorted], before[kMaxSorted], first_row[kMaxSorted], sums[kWarps];
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rank = static_cast<int>(cluster.block_rank());
  const std::int64_t slots = experts.rows * experts.cols, run = (slots + kCtas * kWarps - 1) / (kCtas * kWarps);
  const std::int64_t first = (rank * kWarps + warp) * run, last = min(first + run, slots);
  std::int32_t* const mine = seen + warp * count;

  for (int e = lane; e < count; e += 32) mine[e] = 0;
  __syncwarp();
  for_slots(experts, count, first, last, [&](std::int64_t, int e, unsigned same) {
    if (e >= 0 && lane == __ffs(same) - 1) mine[e] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
  if (thread < count) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int of_warp = seen[w * count + thread];
      seen[w * count + thread] = sum;
      sum += of_warp;
    }
    of_cta[thread] = sum;
  }
  cluster.sync();
  int total = 0;
  if (thread < count) {
    for (int r = 0; r < kCtas; ++r) {
      if (r == rank) before[thread] = total;
      total += cluster.map_shared_rank(of_cta, r)[thread];
    }
    if (rank == 0) counts[thread] = total;
  }
  cluster.sync(); // nobody reads here any more
  if (row_map.data == nullptr) return;

  const int rows = thread >= count ? 0 : capacity > 0 ? static_cast<int>(capacity) : total;
  int sum = rows; // of this thread's expert and those before
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w];
  if (thread < count) {
    first_row[thread] = sum - rows;
    if (rank == 0) offsets[thread + 1] = sum;
  }
  if (rank == 0 && thread == 0) offsets[0] = 0;
  __syncthreads();

  for_slots(experts, count, first, last, [&](std::int64_t s, int e, unsigned same) {
    if (e >= 0) {
      const std::int64_t place = before[e] + mine[e] + __popc(same & ((1u << lane) - 1));
      const auto slot = static_cast<std::uint32_t>(s), cols = static_cast<std::uint32_t>(experts.cols), row = slot / cols;
      store_index(row_map, row, slot - row * cols, capacity > 0 && place >= capacity ? -1 : first_row[e] + place);
    }
    __syncwarp();
    if (e >= 0 && lane == __ffs(same) - 1) mine[e] += __popc(same);
    __syncwarp();
  });
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
  sort_slots({experts, count, 0, {}, counts, nullptr}, context);
}

void add_counts(const std::int32_t* from, int count, std::int64_t* to, const LaunchContext& context) {
  add_counts_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(from, count, to);
  check_launch("add_counts_kernel");
}

void sort_slots(const SortParams& p, const LaunchContext& context) {
  if (p.count < 1 || p.count > kMaxSorted) refuse("sort_slots", {{"experts", p.count}}, "1 to 1024 experts");
  const std::size_t bytes = static_cast<std::size_t>(p.count) * kWarps * sizeof(std::int32_t);
  GDN_CUDA(cudaFuncSetAttribute(sort_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  sort_kernel<<<kCtas, 32 * kWarps, bytes, context.stream>>>(p.experts, p.count, p.capacity, p.counts, p.offsets, p.row_map);
  check_launch("sort_kernel");
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
