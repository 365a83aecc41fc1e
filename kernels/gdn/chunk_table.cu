#include "kernels/gdn/chunk_table.h"

#include "kernels/common/check.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kRankedSequences = 16384; // beyond this, order is the identity: lengths average short

__device__ std::int32_t boundary(const GdnChunkTableParams& p, std::int64_t i) {
  return p.cu_seqlens_int64
             ? static_cast<std::int32_t>(static_cast<const std::int64_t*>(p.cu_seqlens)[i])
             : static_cast<const std::int32_t*>(p.cu_seqlens)[i];
}

__device__ std::int32_t pieces(std::int32_t rows) { return (rows + kChunk - 1) / kChunk; }

// One block: exclusive prefix sum of the chunks per sequence, kThreads sequences at a time.
__global__ void gdn_chunk_offsets_kernel(GdnChunkTableParams p) {
  __shared__ std::int32_t warp_sums[32];
  __shared__ std::int32_t carry;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (std::int64_t first = 0; first < p.sequences; first += kThreads) {
    const std::int64_t s = first + threadIdx.x;
    const std::int32_t own = s < p.sequences ? pieces(boundary(p, s + 1) - boundary(p, s)) : 0;
    std::int32_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    std::int32_t before = carry;
    for (int w = 0; w < warp; ++w) before += warp_sums[w];
    if (s < p.sequences) p.table.offsets[s] = before + sum - own;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) carry = before + sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.table.offsets[p.sequences] = carry;
    const std::int64_t used = boundary(p, p.sequences);
    p.table.offsets[p.sequences + 1] = carry + pieces(static_cast<std::int32_t>(p.tokens - used));
  }
}

// One thread a chunk: its sequence by bisection over the offsets.
__global__ void gdn_chunk_rows_kernel(GdnChunkTableParams p, std::int64_t capacity) {
  const std::int64_t c = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (c >= capacity) return;
  const std::int32_t* offsets = p.table.offsets;
  GdnChunk chunk{0, 0, 0, GdnChunk::kUnused};
  if (c < offsets[p.sequences]) {
    std::int64_t low = 0, high = p.sequences; // offsets[low] <= c < offsets[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (offsets[middle] <= c ? low : high) = middle;
    }
    const std::int32_t first =
        boundary(p, low) + static_cast<std::int32_t>(c - offsets[low]) * kChunk;
    chunk = {static_cast<std::int32_t>(low), first, min(kChunk, boundary(p, low + 1) - first),
             GdnChunk::kTokens};
  } else if (c < offsets[p.sequences + 1]) {
    const std::int32_t first =
        boundary(p, p.sequences) + static_cast<std::int32_t>(c - offsets[p.sequences]) * kChunk;
    chunk = {0, first, min(kChunk, static_cast<std::int32_t>(p.tokens) - first),
             GdnChunk::kPadding};
  }
  p.table.chunks[c] = chunk;
}

// One thread a sequence: its rank among all lengths.
__global__ void gdn_sequence_order_kernel(GdnChunkTableParams p) {
  const std::int64_t s = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (s >= p.sequences) return;
  std::int64_t rank = s;
  if (p.sequences <= kRankedSequences) {
    const std::int32_t* offsets = p.table.offsets;
    const std::int32_t own = offsets[s + 1] - offsets[s];
    rank = 0;
    for (std::int64_t i = 0; i < p.sequences; ++i) {
      const std::int32_t other = offsets[i + 1] - offsets[i];
      rank += other > own || (other == own && i < s);
    }
  }
  p.table.order[rank] = static_cast<std::int32_t>(s);
}

} // namespace

void gdn_chunk_table(const GdnChunkTableParams& p, const LaunchContext& context) {
  const std::int64_t capacity = gdn_chunk_capacity(p.tokens, p.sequences);
  gdn_chunk_offsets_kernel<<<1, kThreads, 0, context.stream>>>(p);
  check_launch("gdn_chunk_offsets_kernel");
  gdn_chunk_rows_kernel<<<static_cast<unsigned>((capacity + 255) / 256), 256, 0, context.stream>>>(
      p, capacity);
  check_launch("gdn_chunk_rows_kernel");
  if (p.sequences == 0) return;
  gdn_sequence_order_kernel<<<static_cast<unsigned>((p.sequences + 63) / 64), 64, 0,
                              context.stream>>>(p);
  check_launch("gdn_sequence_order_kernel");
}

} // namespace gdn::kernels
