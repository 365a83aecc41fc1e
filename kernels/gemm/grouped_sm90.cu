// Grouped products: persistent CTAs walk the 128 x 128 tiles of all experts, whose row ranges they read
// from memory. One warp fills a ring of stages, two warpgroups own 64 rows of a tile each.
//
//   forward   y = x w^T      both operands along their rows
//   dgrad     dx = dy w      w across its rows
//   wgrad     dw += dy^T x   both across their rows: the contraction is the expert's rows
#include "kernels/common/check.h"
#include "kernels/common/matrix.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/common/tiles_sm90.cuh"
#include "kernels/gemm/grouped_gemm.h"

namespace gdn::kernels {
namespace {

enum class Form { kForward, kDgrad, kWgrad };

constexpr int kStages = 4, kThreads = 3 * kWarpgroup, kMath = 2 * kWarpgroup;
constexpr int kTile = 128; // rows and columns of a result tile
constexpr int kRow = kTile + 8; // floats from row to row of a result on its way out: no bank twice in a warp's store

struct Args {
  CUtensorMap a, b;
  const std::int32_t* offsets;
  int experts;
  int out, in; // of a weight matrix
  Matrix d;
  bool accumulate;
};

struct Shared {
  char tiles[kStages][4][kTileBytes]; // two of a, two of b
  float out[2][64][kRow];             // wgrad: a warpgroup's result, until it has been added to memory
  std::uint64_t full[kStages], empty[kStages];
  std::int32_t offsets[kMaxExperts + 1], before[kMaxExperts + 1]; // before: result tiles of the experts before
};

// A result tile and the steps of its contraction.
struct Item {
  int expert, m, n;          // first row (inside the expert) and column
  int first_row, rows;       // of the expert
  int steps;                 // of 64 along the contraction
};

template <Form kForm>
struct Shape {
  static constexpr Contract kA = kForm == Form::kWgrad ? Contract::kAcrossRows : Contract::kAlongRow;
  static constexpr Contract kB = kForm == Form::kForward ? Contract::kAlongRow : Contract::kAcrossRows;
  __device__ static int columns(const Args& a) { return kForm == Form::kForward ? a.out : a.in; }
  __device__ static int row_tiles(const Args& a, int rows) {
    if (kForm == Form::kWgrad) return rows > 0 ? (a.out + kTile - 1) / kTile : 0;
    return (rows + kTile - 1) / kTile;
  }
};

// Result tiles of the experts before each; all threads take part.
template <Form kForm>
__device__ void count_tiles(const Args& a, Shared& s) {
  for (int e = threadIdx.x; e <= a.experts; e += kThreads) s.offsets[e] = a.offsets[e];
  __syncthreads();
  if (threadIdx.x < 32) {
    const int column_tiles = (Shape<kForm>::columns(a) + kTile - 1) / kTile;
    int total = 0;
    for (int first = 0; first < a.experts; first += 32) {
      const int e = first + static_cast<int>(threadIdx.x);
      const int mine = e < a.experts ? Shape<kForm>::row_tiles(a, s.offsets[e + 1] - s.offsets[e]) * column_tiles : 0;
      int sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (static_cast<int>(threadIdx.x) >= step) sum += other;
      }
      if (e < a.experts) s.before[e] = total + sum - mine;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) s.before[a.experts] = total;
  }
  __syncthreads();
}

template <Form kForm>
__device__ Item item_of(const Args& a, const Shared& s, int tile) {
  int low = 0, high = a.experts; // before[low] <= tile < before[high], so an expert without tiles is never found
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (s.before[middle] <= tile ? low : high) = middle;
  }
  Item item;
  item.expert = low;
  item.first_row = s.offsets[low];
  item.rows = s.offsets[low + 1] - item.first_row;
  const int row_tiles = Shape<kForm>::row_tiles(a, item.rows), index = tile - s.before[low];
  item.m = index % row_tiles * kTile; // neighbours share the weights' columns
  item.n = index / row_tiles * kTile;
  const int depth = kForm == Form::kForward ? a.in : kForm == Form::kDgrad ? a.out : item.rows;
  item.steps = (depth + 63) / 64;
  return item;
}

template <Form kForm>
__device__ void feed(const Args& a, Shared& s) {
  Ring<kStages> ring;
  for (int tile = blockIdx.x; tile < s.before[a.experts]; tile += gridDim.x) {
    const Item item = item_of<kForm>(a, s, tile);
    for (int step = 0; step < item.steps; ++step, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
      std::uint64_t* full = &s.full[ring.stage];
      char(*tiles)[kTileBytes] = s.tiles[ring.stage];
      barrier_expect(full, 4 * kTileBytes);
      const int k = 64 * step;
      for (int i = 0; i < 2; ++i) {
        if constexpr (kForm == Form::kWgrad) {
          load_box(tiles[i], &a.a, full, item.m + 64 * i, 0, item.first_row + k);
          load_box(tiles[2 + i], &a.b, full, item.n + 64 * i, 0, item.first_row + k);
        } else {
          load_box(tiles[i], &a.a, full, k, 0, item.first_row + item.m + 64 * i);
          if constexpr (kForm == Form::kForward)
            load_box(tiles[2 + i], &a.b, full, k, 0, item.expert * a.out + item.n + 64 * i);
          else
            load_box(tiles[2 + i], &a.b, full, item.n + 64 * i, 0, item.expert * a.out + k);
        }
      }
    }
  }
}

// Adds a warpgroup's 64 x 128 result to the weight gradient. Every element is added to once a launch, by one CTA, so the
// sum has one order although the memory does the adding.
__device__ __forceinline__ void add_result(const Args& a, Shared& s, const Item& item, const float (&d)[64], int group, const Lane& at) {
  const int thread = threadIdx.x % kWarpgroup, m = item.m + 64 * group + thread;
  store_wait_read<0>(); // of this thread's row of the result before
  named_barrier(2 + group, kWarpgroup);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < 16; ++n)
      *reinterpret_cast<float2*>(&s.out[group][at.row() + 8 * half][8 * n + 2 * at.t]) = float2{d[4 * n + 2 * half], d[4 * n + 2 * half + 1]};
  fence_async_proxy();
  named_barrier(2 + group, kWarpgroup);
  if (thread >= 64 || m >= a.out) return;
  add_bulk(static_cast<float*>(a.d.data) + (static_cast<std::int64_t>(item.expert) * a.out + m) * a.d.stride + item.n, s.out[group][thread],
           4 * min(kTile, a.in - item.n));
  store_commit();
}

// Rounds a warpgroup's result to the rows of the expert.
__device__ __forceinline__ void write_result(const Args& a, const Item& item, int columns, const float (&d)[64], int group, const Lane& at) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = item.m + 64 * group + at.row() + 8 * half; // row inside the expert's result
    if (m >= item.rows) continue;
    Bf16* const row = static_cast<Bf16*>(a.d.data) + static_cast<std::int64_t>(item.first_row + m) * a.d.stride + item.n + 2 * at.t;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if (item.n + 8 * n >= columns) continue;
      auto* const pair = reinterpret_cast<std::uint32_t*>(row + 8 * n);
      float x = d[4 * n + 2 * half], y = d[4 * n + 2 * half + 1];
      if (a.accumulate) {
        const std::uint32_t old = *pair;
        x += bf16_low(old);
        y += bf16_high(old);
      }
      *pair = pack_bf16(x, y);
    }
  }
}

template <Form kForm>
__device__ void compute(const Args& a, Shared& s) {
  using S = Shape<kForm>;
  const Lane at;
  const int group = threadIdx.x / kWarpgroup;
  const std::uint32_t tiles = descriptor(smem_address(s.tiles));
  Ring<kStages> ring;
  for (int tile = blockIdx.x; tile < s.before[a.experts]; tile += gridDim.x) {
    const Item item = item_of<kForm>(a, s, tile);
    float d[64];
    int previous = -1;
    for (int step = 0; step < item.steps; ++step, ring.advance()) {
      const int stage = __shfl_sync(~0u, ring.stage, 0);
      barrier_wait(&s.full[stage], ring.parity);
      if (kForm == Form::kWgrad && 64 * (step + 1) > item.rows) { // the next expert's rows, or anything
        zero_tail(s.tiles[stage][0], 4, item.rows - 64 * step, threadIdx.x, kMath);
        fence_async_proxy();
        named_barrier(1, kMath);
      }
      const std::uint32_t left = tiles + (4 * stage + group) * kNextTile, right = tiles + (4 * stage + 2) * kNextTile;
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        product<S::kA, S::kB>(d, left + step_offset<S::kA>(k), right + step_offset<S::kB>(k), step > 0 || k > 0);
      products_commit();
      if (previous >= 0) {
        products_wait<1>();
        warp_arrive(&s.empty[previous]);
      }
      previous = stage;
    }
    products_wait<0>(d);
    warp_arrive(&s.empty[previous]);

    if constexpr (kForm == Form::kWgrad) add_result(a, s, item, d, group, at);
    else write_result(a, item, S::columns(a), d, group, at);
  }
}

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kMath / 32 * kWarpArrivals);
    }
    barrier_init_fence();
  }
  count_tiles<kForm>(a, s);
  if (threadIdx.x >= kMath) {
    if (threadIdx.x == kMath) feed<kForm>(a, s);
  } else {
    compute<kForm>(a, s);
    if (kForm == Form::kWgrad) store_wait<0>();
  }
}

CUtensorMap map_of(const char* name, const Matrix& m) {
  return make_tile_map({name, m.data, m.rows, 1, m.cols, m.stride, m.cols});
}

template <Form kForm>
void launch(const Groups& g, const Matrix& left, const Matrix& right, const Matrix& w, const Matrix& d, bool accumulate,
            const LaunchContext& context) {
  if (g.experts < 1 || g.experts > kMaxExperts || w.rows % g.experts != 0)
    refuse("grouped_gemm", {{"experts", g.experts}, {"weight rows", w.rows}}, "1 to 1024 experts of equal size");
  if (left.rows == 0 || right.rows == 0) return;
  Args a{map_of("left", left), map_of("right", right), g.offsets, g.experts, static_cast<int>(w.rows / g.experts),
         static_cast<int>(w.cols), d, accumulate};
  const auto kernel = grouped_kernel<kForm>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<static_cast<unsigned>(context.sm_count), kThreads, sizeof(Shared), context.stream>>>(a);
  check_launch("grouped_kernel");
}

} // namespace

void grouped_forward(const Groups& g, const Matrix& x, const Matrix& w, const Gradient& y, const LaunchContext& context) {
  launch<Form::kForward>(g, x, w, w, y.to, y.accumulate, context);
}
void grouped_dgrad(const Groups& g, const Matrix& dy, const Matrix& w, const Gradient& dx, const LaunchContext& context) {
  launch<Form::kDgrad>(g, dy, w, w, dx.to, dx.accumulate, context);
}
void grouped_wgrad(const Groups& g, const Matrix& dy, const Matrix& x, const Matrix& dw, const LaunchContext& context) {
  launch<Form::kWgrad>(g, dy, x, dw, dw, true, context);
}

} // namespace gdn::kernels
