// The result tiles of all experts, one expert after the other, as persistent CTAs walk them.
#pragma once
#include "kernels/common/tiles_sm90.cuh"
#include "kernels/gemm/grouped_gemm.h"

namespace gdn::kernels {

struct ExpertTiles { // in shared memory
  std::int32_t offsets[kMaxExperts + 1]; // rows of the experts before
  std::int32_t before[kMaxExperts + 1];  // result tiles of the experts before
};

// `tiles_of(rows)`: result tiles of an expert with so many rows. All threads of the CTA take part.
template <class F>
__device__ __forceinline__ void count_tiles(ExpertTiles& s, const std::int32_t* offsets, int experts, F tiles_of) {
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) s.offsets[e] = offsets[e];
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0;
    for (int first = 0; first < experts; first += 32) {
      const int e = first + static_cast<int>(threadIdx.x);
      const int mine = e < experts ? tiles_of(s.offsets[e + 1] - s.offsets[e]) : 0;
      int sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (static_cast<int>(threadIdx.x) >= step) sum += other;
      }
      if (e < experts) s.before[e] = total + sum - mine;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) s.before[experts] = total;
  }
  __syncthreads();
}

// The expert of a tile that exists: the last one with no more tiles before it. A whole warp asks; 32 blocks of 32 experts.
static_assert(kMaxExperts == 32 * 32);
__device__ __forceinline__ int expert_of(const ExpertTiles& s, int experts, int tile) {
  const int lane = threadIdx.x % 32;
  const auto last = [&](int e) { return 31 - __clz(__ballot_sync(~0u, e < experts && s.before[e] <= tile)); };
  const int block = 32 * last(32 * lane);
  return block + last(block + lane);
}

} // namespace gdn::kernels
