// Weight gradients of experts, dw_e += dy_e^T x_e: both operands lie across their rows, the contraction is the expert's
// rows. Persistent CTAs, tiles of 128 x 256. One warp fills a ring of stages, 64 rows a step; another fetches what the
// gradient holds, 64 x 32 at a time, while the products run; two warpgroups own 64 rows of a tile each, add and send back.
#include "kernels/common/check.h"
#include "kernels/common/matrix.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/gemm/grouped_tiles.cuh"
#include "kernels/gemm/wide_product.cuh"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 3 * kWarpgroup, kMath = 2 * kWarpgroup;
constexpr int kStages = 3, kBuffers = 4;
constexpr int kHigh = 128, kWide = 256;             // a tile
constexpr int kTiles = kHigh / 64 + kWide / 64;     // of a stage: two of dy, four of x
constexpr int kHalf = 32, kHalfBytes = kHalf * 128; // the last rows of an expert are fetched 32 at a time
constexpr int kPartBytes = 64 * 128;                // 64 x 32 of the gradient

struct Args {
  CUtensorMap dy, x, dy_half, x_half; // boxes of 64 rows; of 32
  CUtensorMap dw;
  const std::int32_t* offsets;
  int experts;
  int out, in; // of a weight matrix
};

struct Shared {
  char tiles[kStages][kTiles][kTileBytes];
  char parts[2][kBuffers][kPartBytes];
  std::uint64_t full[kStages], empty[kStages], part_full[2][kBuffers], part_empty[2][kBuffers];
  ExpertTiles experts;
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

struct Item {
  int expert, out, in; // first row and column in the weight matrix
  int first_row, rows; // of the expert
};

__device__ __forceinline__ Item item_of(const Args& a, const Shared& s, int tile) {
  Item item;
  item.expert = expert_of(s.experts, a.experts, tile);
  const int high = (a.out + kHigh - 1) / kHigh, index = tile - s.experts.before[item.expert];
  item.out = index % high * kHigh;
  item.in = index / high * kWide;
  item.first_row = s.experts.offsets[item.expert];
  item.rows = s.experts.offsets[item.expert + 1] - item.first_row;
  return item;
}

__device__ void feed(const Args& a, Shared& s) {
  Ring<kStages> ring;
  const int tiles = s.experts.before[a.experts];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Item item = item_of(a, s, tile);
    if (threadIdx.x % 32 == 0)
      for (int row = 0; row < item.rows; row += 64, ring.advance()) {
        char(*const to)[kTileBytes] = s.tiles[ring.stage];
        std::uint64_t* const full = &s.full[ring.stage];
        const bool half = item.rows - row <= kHalf;
        barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        barrier_expect(full, kTiles * (half ? kHalfBytes : kTileBytes));
        for (int i = 0; i < 2; ++i) load_box(to[i], half ? &a.dy_half : &a.dy, full, item.out + 64 * i, 0, item.first_row + row);
        for (int i = 0; i < kWide / 64; ++i) load_box(to[2 + i], half ? &a.x_half : &a.x, full, item.in + 64 * i, 0, item.first_row + row);
      }
    __syncwarp();
  }
}

__device__ void fetch_gradient(const Args& a, Shared& s) {
  Ring<kBuffers> ring;
  const int tiles = s.experts.before[a.experts];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Item item = item_of(a, s, tile);
    if (threadIdx.x % 32 == 0)
      for (int part = 0; part < kWide / 32; ++part, ring.advance())
        for (int group = 0; group < 2; ++group) {
          std::uint64_t* const full = &s.part_full[group][ring.stage];
          barrier_wait(&s.part_empty[group][ring.stage], ring.parity ^ 1);
          barrier_expect(full, kPartBytes);
          load_box(s.parts[group][ring.stage], &a.dw, full, item.in + 32 * part, item.expert, item.out + 64 * group);
        }
    __syncwarp();
  }
}

// Zeroes the rows of a stage from `rows` on: the next expert's, or anything.
__device__ __forceinline__ void zero_behind(char (*tiles)[kTileBytes], int rows) {
  const int pieces = (64 - rows) * 8;
  for (int i = threadIdx.x; i < kTiles * pieces; i += kMath)
    *reinterpret_cast<uint4*>(tiles[i / pieces] + rows * 128 + i % pieces * 16) = uint4{0, 0, 0, 0};
}

// Adds a warpgroup's result to the parts of the gradient as they arrive and sends them back.
__device__ __forceinline__ void add_result(const Args& a, Shared& s, const Item& item, const float (&d)[kWide / 2], int group,
                                           Ring<kBuffers>& ring, bool& sent, const Lane& at) {
#pragma unroll
  for (int part = 0; part < kWide / 32; ++part, ring.advance()) {
    char* const buffer = s.parts[group][ring.stage];
    barrier_wait(&s.part_full[group][ring.stage], ring.parity);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = 16 * part + 4 * n + 2 * half;
        auto* const pair = reinterpret_cast<float2*>(buffer + in_tile(at.row() + 8 * half, 2 * n + at.t / 2) + at.t % 2 * 8);
        const float2 old = *pair;
        *pair = float2{old.x + d[i], old.y + d[i + 1]};
      }
    fence_async_proxy();
    named_barrier(2 + group, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
      store_box(&a.dw, buffer, item.in + 32 * part, item.expert, item.out + 64 * group);
      store_commit();
      store_wait_read<1>();
      if (sent) barrier_arrive(&s.part_empty[group][(ring.stage + kBuffers - 1) % kBuffers]); // the part before has left
      sent = true;
    }
  }
}

__device__ void compute(const Args& a, Shared& s) {
  constexpr Contract kAcross = Contract::kAcrossRows;
  const Lane at;
  const int group = threadIdx.x / kWarpgroup, tiles = s.experts.before[a.experts];
  const std::uint32_t first = descriptor(smem_address(s.tiles));
  Ring<kStages> ring;
  Ring<kBuffers> parts;
  bool sent = false;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Item item = item_of(a, s, tile);
    float d[kWide / 2];
    int previous = -1;
    for (int row = 0; row < item.rows; row += 64, ring.advance()) {
      const int stage = __shfl_sync(~0u, ring.stage, 0), rows = item.rows - row;
      barrier_wait(&s.full[stage], ring.parity);
      if (rows < 64) {
        zero_behind(s.tiles[stage], rows);
        fence_async_proxy();
        named_barrier(1, kMath);
      }
      const std::uint32_t left = first + (kTiles * stage + group) * kNextTile, right = first + (kTiles * stage + 2) * kNextTile;
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wide_product<kWide, kAcross, kAcross>(d, left + step_offset<kAcross>(k), right + step_offset<kAcross>(k), row > 0 || k > 0);
      products_commit();
      if (previous >= 0) {
        products_wait<1>();
        warp_arrive(&s.empty[previous]);
      }
      previous = stage;
    }
    products_wait<0>(d);
    warp_arrive(&s.empty[previous]);
    add_result(a, s, item, d, group, parts, sent, at);
  }
  store_wait<0>();
}

__global__ void __launch_bounds__(kThreads, 1) grouped_wgrad_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (std::uint64_t& barrier : s.full) barrier_init(&barrier, 1);
    for (std::uint64_t& barrier : s.empty) barrier_init(&barrier, kMath / 32 * kWarpArrivals);
    for (int group = 0; group < 2; ++group) {
      for (std::uint64_t& barrier : s.part_full[group]) barrier_init(&barrier, 1);
      for (std::uint64_t& barrier : s.part_empty[group]) barrier_init(&barrier, 1);
    }
    barrier_init_fence();
  }
  const int tiles = ((a.out + kHigh - 1) / kHigh) * ((a.in + kWide - 1) / kWide);
  count_tiles(s.experts, a.offsets, a.experts, [&](int rows) { return rows > 0 ? tiles : 0; });
  if (threadIdx.x >= kMath) {
    give_registers<40>();
    if (threadIdx.x < kMath + 32) feed(a, s);
    else if (threadIdx.x < kMath + 64) fetch_gradient(a, s);
  } else {
    take_registers<232>();
    compute(a, s);
  }
}

} // namespace

void grouped_wgrad(const Groups& g, const Matrix& dy, const Matrix& x, const Matrix& dw, const LaunchContext& context) {
  if (g.experts < 1 || g.experts > kMaxExperts || dw.rows % g.experts != 0)
    refuse("grouped_wgrad", {{"experts", g.experts}, {"weight rows", dw.rows}}, "1 to 1024 experts of equal size");
  if (dy.rows == 0) return;
  const std::int64_t out = dw.rows / g.experts;
  const TokenTensor left{"output gradient", dy.data, dy.rows, 1, dy.cols, dy.stride, dy.cols}, right{"rows", x.data, x.rows, 1, x.cols, x.stride, x.cols};
  const TokenTensor gradient{"weight gradient", dw.data, out, g.experts, dw.cols, dw.stride, out * dw.stride};
  const Args a{make_tile_map(left), make_tile_map(right), make_box_map(left, kHalf, DType::BF16), make_box_map(right, kHalf, DType::BF16),
               make_box_map(gradient, 64, DType::FP32), g.offsets, g.experts, static_cast<int>(out), static_cast<int>(dw.cols)};
  GDN_CUDA(cudaFuncSetAttribute(grouped_wgrad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  grouped_wgrad_kernel<<<static_cast<unsigned>(context.sm_count), kThreads, sizeof(Shared), context.stream>>>(a);
  check_launch("grouped_wgrad_kernel");
}

} // namespace gdn::kernels
