// Grouped products whose result is rows, computed as its transpose: weights are the left operand of wgmma and rows the
// right one, whose number is free. A tile is 128 columns of the result by up to 288 rows of an expert, so an expert of the
// usual size is one tile high, its weights are fetched once, and no products are made for rows it does not have.
//
//   forward   y^T = w x^T      weights along their rows
//   dgrad     dx^T = w^T dy^T  weights across their rows
//
// Persistent CTAs. One warp fills a ring of stages, two warpgroups own 64 columns of a tile each; a result is turned in
// the weights' place of the stage that was read last, which no other warpgroup reads: so one's result leaves under the
// products of the other.
#include "kernels/common/check.h"
#include "kernels/common/matrix.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/gemm/grouped_tiles.cuh"
#include "kernels/gemm/wide_product.cuh"

namespace gdn::kernels {
namespace {

enum class Form { kForward, kDgrad };

constexpr int kStages = 4, kThreads = 3 * kWarpgroup, kMath = 2 * kWarpgroup;
constexpr int kColumns = 128;        // of a tile
constexpr int kBox = 32, kBoxes = 9; // a tile has up to kBoxes x kBox rows
constexpr int kBoxBytes = kBox * 128;
constexpr int kChunk = 2; // boxes of a result that are turned together
static_assert(kChunk * kBoxBytes == kTileBytes);

struct Args {
  CUtensorMap w, x, x_half; // boxes of 64 rows; of 32
  const std::int32_t* offsets;
  int experts;
  int depth, columns; // of the contraction and of y
  Matrix y;
  bool accumulate;
};

struct Stage {
  char w[2][kTileBytes];
  char x[kBoxes * kBoxBytes];
};
struct Shared {
  Stage stages[kStages];
  std::uint64_t full[kStages], empty[kStages];
  ExpertTiles tiles;
};
static_assert(sizeof(Shared) <= kMaxSharedBytes);

// A result tile.
struct Item {
  int expert, column;
  int first_row, rows;
  __device__ int boxes() const { return (rows + kBox - 1) / kBox; }
};

__device__ __forceinline__ int row_tiles(int rows) { return (rows + kBox * kBoxes - 1) / (kBox * kBoxes); }

// The expert's rows are divided evenly.
__device__ __forceinline__ Item item_of(const Args& a, const Shared& s, int tile) {
  Item item;
  item.expert = expert_of(s.tiles, a.experts, tile);
  const int first = s.tiles.offsets[item.expert], rows = s.tiles.offsets[item.expert + 1] - first;
  const int high = row_tiles(rows), index = tile - s.tiles.before[item.expert];
  const int height = ((rows + high - 1) / high + kBox - 1) / kBox * kBox;
  item.column = index / high * kColumns;
  item.first_row = first + index % high * height; // neighbours share the weights
  item.rows = min(height, first + rows - item.first_row);
  return item;
}

template <Form kForm>
__device__ void feed(const Args& a, Shared& s) {
  Ring<kStages> ring;
  const int steps = (a.depth + 63) / 64, tiles = s.tiles.before[a.experts];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Item item = item_of(a, s, tile);
    const int boxes = item.boxes();
    if (threadIdx.x % 32 == 0)
      for (int step = 0; step < steps; ++step, ring.advance()) {
        Stage& stage = s.stages[ring.stage];
        std::uint64_t* const full = &s.full[ring.stage];
        barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        barrier_expect(full, 2 * kTileBytes + boxes * kBoxBytes);
        for (int i = 0; i < 2; ++i) {
          const int column = item.column + 64 * i;
          if constexpr (kForm == Form::kForward) load_box(stage.w[i], &a.w, full, 64 * step, item.expert, column);
          else load_box(stage.w[i], &a.w, full, column, item.expert, 64 * step);
        }
        for (int b = 0; b + 2 <= boxes; b += 2) load_box(stage.x + b * kBoxBytes, &a.x, full, 64 * step, 0, item.first_row + kBox * b);
        if (boxes % 2 == 1) load_box(stage.x + (boxes - 1) * kBoxBytes, &a.x_half, full, 64 * step, 0, item.first_row + kBox * (boxes - 1));
      }
    __syncwarp();
  }
}

// A warpgroup's 64 columns by all rows of a tile. One array for tiles of every height: arrays of their own would all be
// live at once.
using Result = float[16 * kBoxes];

// Adds one 16-deep step to 32 kHigh rows.
template <Contract kW, int kHigh>
__device__ __forceinline__ void multiply(Result& d, std::uint32_t w, std::uint32_t x, int accumulate) {
  wide_product<32 * (kHigh < 8 ? kHigh : 8), kW, Contract::kAlongRow>(d, w, x, accumulate);
  if constexpr (kHigh > 8) wide_product<32 * (kHigh - 8), kW, Contract::kAlongRow>(d + 128, w, x + 4 * kNextTile, accumulate);
}

// Contracts a tile; returns the stage that was read last, which is not free yet.
template <Contract kW, int kHigh>
__device__ __forceinline__ int contract(const Args& a, Shared& s, Ring<kStages>& ring, int group, Result& d) {
  const std::uint32_t w = descriptor(smem_address(s.stages[0].w[group])), x = descriptor(smem_address(s.stages[0].x));
  const int steps = (a.depth + 63) / 64;
  int previous = -1;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const int stage = __shfl_sync(~0u, ring.stage, 0);
    barrier_wait(&s.full[stage], ring.parity);
    const std::uint32_t offset = stage * static_cast<std::uint32_t>(sizeof(Stage) >> 4);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<kW, kHigh>(d, w + offset + step_offset<kW>(k), x + offset + step_offset<Contract::kAlongRow>(k), step > 0 || k > 0);
    products_commit();
    if (previous >= 0) {
      products_wait<1>();
      warp_arrive(&s.empty[previous]);
    }
    previous = stage;
  }
  products_wait<0>(reinterpret_cast<float(&)[16 * kHigh]>(d));
  return previous;
}

// Rounds a warpgroup's result, turns it in `out` and writes it to memory. With `accumulate` what is in memory goes to `out`
// first and is added there.
template <int kHigh>
__device__ __forceinline__ void send(const Args& a, char* out, const Item& item, const Result& d, int group, const Lane& at) {
  const int thread = threadIdx.x % kWarpgroup, row = thread / 8, of_row = thread % 8; // pieces of 16 bytes
  const int column = item.column + 64 * group + 8 * of_row;
  const int matrix = at.lane / 8, piece = 2 * at.warp + matrix % 2, in_step = 8 * (matrix / 2) + at.lane % 8;
#pragma unroll
  for (int first = 0; first < kHigh; first += kChunk) {
    const int rows = column < a.columns ? min(item.rows - kBox * first, kChunk * kBox) : 0;
    Bf16* const to = static_cast<Bf16*>(a.y.data) + static_cast<std::int64_t>(item.first_row + kBox * first) * a.y.stride + column;
    const auto in_memory = [&](int r) { return reinterpret_cast<uint4*>(to + r * a.y.stride); };
    const auto in_shared = [&](int r) { return reinterpret_cast<uint4*>(out + in_tile(r, of_row)); };
    named_barrier(1 + group, kWarpgroup); // `out` has been read
    if (a.accumulate) {
      for (int r = row; r < rows; r += kWarpgroup / 8) *in_shared(r) = *in_memory(r);
      named_barrier(1 + group, kWarpgroup);
    }
#pragma unroll
    for (int k = 2 * first; k < 2 * (first + kChunk) && k < 2 * kHigh; ++k) {
      const std::uint32_t address = smem_address(out) + in_tile(16 * (k - 2 * first) + in_step, piece);
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = d[8 * k + i];
      if (a.accumulate) {
        std::uint32_t old[4];
        load_matrix_transposed(old, address);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[2 * i] += bf16_low(old[i]), y[2 * i + 1] += bf16_high(old[i]);
      }
      store_matrix_transposed(address, pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
    }
    named_barrier(1 + group, kWarpgroup);
#pragma unroll 4
    for (int r = row; r < rows; r += kWarpgroup / 8) *in_memory(r) = *in_shared(r);
  }
  fence_async_proxy(); // the copy engine writes there next
}

template <Form kForm>
__device__ void compute(const Args& a, Shared& s) {
  constexpr Contract kW = kForm == Form::kForward ? Contract::kAlongRow : Contract::kAcrossRows;
  const Lane at;
  const int group = threadIdx.x / kWarpgroup, tiles = s.tiles.before[a.experts];
  Ring<kStages> ring;
  Result d;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Item item = item_of(a, s, tile);
    const auto run = [&](auto high) {
      const int last = contract<kW, high.value>(a, s, ring, group, d);
      send<high.value>(a, s.stages[last].w[group], item, d, group, at);
      warp_arrive(&s.empty[last]);
    };
    switch (__shfl_sync(~0u, item.boxes(), 0)) {
    case 1: run(std::integral_constant<int, 1>()); break;
    case 2: run(std::integral_constant<int, 2>()); break;
    case 3: run(std::integral_constant<int, 3>()); break;
    case 4: run(std::integral_constant<int, 4>()); break;
    case 5: run(std::integral_constant<int, 5>()); break;
    case 6: run(std::integral_constant<int, 6>()); break;
    case 7: run(std::integral_constant<int, 7>()); break;
    case 8: run(std::integral_constant<int, 8>()); break;
    case 9: run(std::integral_constant<int, 9>()); break;
    }
  }
}

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 1) grouped_rows_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kMath / 32 * kWarpArrivals);
    }
    barrier_init_fence();
  }
  const int column_tiles = (a.columns + kColumns - 1) / kColumns;
  count_tiles(s.tiles, a.offsets, a.experts, [&](int rows) { return row_tiles(rows) * column_tiles; });
  if (threadIdx.x >= kMath) {
    give_registers<40>();
    if (threadIdx.x < kMath + 32) feed<kForm>(a, s);
  } else {
    take_registers<232>();
    compute<kForm>(a, s);
  }
}

template <Form kForm>
void launch(const Groups& g, const Matrix& x, const Matrix& w, const Gradient& y, const LaunchContext& context) {
  if (g.experts < 1 || g.experts > kMaxExperts || w.rows % g.experts != 0)
    refuse("grouped_gemm", {{"experts", g.experts}, {"weight rows", w.rows}}, "1 to 1024 experts of equal size");
  if (x.rows == 0) return;
  const std::int64_t out = w.rows / g.experts;
  const TokenTensor weights{"weights", w.data, out, g.experts, w.cols, w.stride, out * w.stride};
  const TokenTensor rows{"rows", x.data, x.rows, 1, x.cols, x.stride, x.cols};
  const bool forward = kForm == Form::kForward;
  const Args a{make_tile_map(weights), make_tile_map(rows), make_box_map(rows, kBox, DType::BF16), g.offsets, g.experts,
               static_cast<int>(forward ? w.cols : out), static_cast<int>(forward ? out : w.cols), y.to, y.accumulate};
  const auto kernel = grouped_rows_kernel<kForm>;
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<static_cast<unsigned>(context.sm_count), kThreads, sizeof(Shared), context.stream>>>(a);
  check_launch("grouped_rows_kernel");
}

} // namespace

void grouped_forward(const Groups& g, const Matrix& x, const Matrix& w, const Gradient& y, const LaunchContext& context) {
  launch<Form::kForward>(g, x, w, y, context);
}
void grouped_dgrad(const Groups& g, const Matrix& dy, const Matrix& w, const Gradient& dx, const LaunchContext& context) {
  launch<Form::kDgrad>(g, dy, w, dx, context);
}

} // namespace gdn::kernels
