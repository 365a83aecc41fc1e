// A CTA owns one tile of queries of two heads that share their keys, a warpgroup each, and walks the tiles of
// keys up to the diagonal. Scores, probabilities and output stay in registers.
#include "kernels/attention/core_tiles.cuh"

namespace gdn::kernels {
namespace {

constexpr int kStages = 2;

struct Args {
  CUtensorMap q, k, v;
  const GdnChunk* chunks;
  const std::int32_t* offsets;
  int capacity, heads, kv_heads, dim;
  float scale;
  Bf16* o;
  std::int64_t o_stride;
  float* lse;
};

template <int kTiles>
struct Shared {
  char q[2][kTiles][kTileBytes], k[kStages][kTiles][kTileBytes], v[kStages][kTiles][kTileBytes];
  std::uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// The tile, its kv head, and the two query heads.
struct Place {
  GdnChunk chunk;
  int index, first; // in the table: this tile, the first of its sequence
  int kv, head[2];
  __device__ explicit Place(const Args& a) {
    const int group = a.heads / a.kv_heads, pairs = (group + 1) / 2;
    index = a.capacity - 1 - static_cast<int>(blockIdx.x) / (a.kv_heads * pairs); // long rows of keys first
    kv = static_cast<int>(blockIdx.x) / pairs % a.kv_heads;
    const int pair = static_cast<int>(blockIdx.x) % pairs;
    head[0] = kv * group + 2 * pair;
    head[1] = 2 * pair + 1 < group ? head[0] + 1 : head[0]; // an odd one out is done twice, written once
    chunk = a.chunks[index];
    first = chunk.kind == GdnChunk::kTokens ? a.offsets[chunk.sequence] : 0;
  }
};

template <int kTiles>
__device__ void feed(const Args& a, Shared<kTiles>& s, const Place& at) {
  barrier_expect(&s.q_full, 2 * kTiles * kTileBytes);
  for (int i = 0; i < 2; ++i) load_head<kTiles>(s.q[i], &a.q, &s.q_full, at.head[i], at.chunk.first_token);
  Ring<kStages> ring;
  int token = at.chunk.first_token - (at.index - at.first) * kChunk;
  for (int j = at.first; j <= at.index; ++j, token += kChunk, ring.advance()) {
    const int i = ring.stage;
    barrier_wait(&s.k_empty[i], ring.parity ^ 1);
    barrier_expect(&s.k_full[i], kTiles * kTileBytes);
    load_head<kTiles>(s.k[i], &a.k, &s.k_full[i], at.kv, token);
    barrier_wait(&s.v_empty[i], ring.parity ^ 1);
    barrier_expect(&s.v_full[i], kTiles * kTileBytes);
    load_head<kTiles>(s.v[i], &a.v, &s.v_full[i], at.kv, token);
  }
}

template <int kTiles>
__device__ void compute(const Args& a, Shared<kTiles>& s, const Place& at) {
  const Lane lane;
  const int me = threadIdx.x / kWarpgroup;
  const std::uint32_t q = descriptor(smem_address(s.q[me])), k = descriptor(smem_address(s.k)), v = descriptor(smem_address(s.v));
  const float scale = a.scale * kLog2e;
  float o[kTiles / 2][64] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  barrier_wait(&s.q_full, 0);
  Ring<kStages> ring;
  for (int j = at.first; j <= at.index; ++j, ring.advance()) {
    const int stage = __shfl_sync(~0u, ring.stage, 0);
    float x[32];
    barrier_wait(&s.k_full[stage], ring.parity);
    products_begin();
    scores<kTiles>(x, q, k + stage * kTiles * kNextTile);
    products_commit();
    products_wait<0>(x);
    warp_arrive(&s.k_empty[stage]);

    if (j == at.index) { // the diagonal; rows behind the sequence see nothing that matters
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (8 * (i / 4) + 2 * lane.t + i % 2 > lane.row() + i % 4 / 2 * 8) x[i] = -INFINITY;
    }
    std::uint32_t p[16];
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = top[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, fmaxf(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      shrink[h] = exp2_fast((top[h] - most) * scale); // a row always sees a key: most is finite
      top[h] = most;
      float here = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float low = exp2_fast((x[4 * n + 2 * h] - most) * scale), high = exp2_fast((x[4 * n + 2 * h + 1] - most) * scale);
        here += low + high;
        p[2 * n + h] = pack_bf16(low, high);
      }
      sum[h] = sum[h] * shrink[h] + here;
    }
#pragma unroll
    for (int half = 0; half < kTiles / 2; ++half)
#pragma unroll
      for (int i = 0; i < 64; ++i) o[half][i] *= shrink[i % 4 / 2];

    barrier_wait(&s.v_full[stage], ring.parity);
    pin_all(o);
    products_begin();
    weighted_rows<kTiles>(o, p, v + stage * kTiles * kNextTile);
    products_commit();
    products_wait<0>(p);
    pin_all(o);
    warp_arrive(&s.v_empty[stage]);
  }

  const int head = at.head[me];
  if (me == 1 && head == at.head[0]) return;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    factor[h] = 1.0f / sum[h];
    const int row = lane.row() + 8 * h;
    if (lane.t == 0 && row < at.chunk.rows)
      a.lse[static_cast<std::int64_t>(at.chunk.first_token + row) * a.heads + head] = top[h] * a.scale + logf(sum[h]);
  }
  write_head(o, factor, a.o + at.chunk.first_token * a.o_stride + static_cast<std::int64_t>(head) * a.dim, a.o_stride, at.chunk.rows,
             a.dim, false, lane);
}

template <int kTiles>
__global__ void __launch_bounds__(kAttentionThreads, 1) attention_forward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<Shared<kTiles>*>(raw);
  const Place at(a);
  if (at.chunk.kind != GdnChunk::kTokens) return;
  if (threadIdx.x == 0) {
    barrier_init(&s.q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.v_full[i], 1);
      barrier_init(&s.k_empty[i], 8 * kWarpArrivals);
      barrier_init(&s.v_empty[i], 8 * kWarpArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 2 * kWarpgroup) feed<kTiles>(a, s, at);
  } else {
    take_registers<240>();
    compute<kTiles>(a, s, at);
  }
}

template <int kTiles>
void launch(const Args& a, unsigned ctas, const LaunchContext& context) {
  const auto kernel = attention_forward_kernel<kTiles>;
  constexpr int kBytes = sizeof(Shared<kTiles>);
  static_assert(kBytes <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<ctas, kAttentionThreads, kBytes, context.stream>>>(a);
  check_launch("attention_forward_kernel");
}

} // namespace

void attention_forward(const AttentionForwardParams& p, const LaunchContext& context) {
  const AttentionShape& s = p.shape;
  check_attention(s, "attention_forward");
  if (s.tokens == 0) return;
  const std::int64_t capacity = gdn_chunk_capacity(s.tokens, s.sequences);
  const Args a{head_map("q", p.q, s.dim), head_map("k", p.k, s.dim), head_map("v", p.v, s.dim), s.table.chunks, s.table.offsets,
               static_cast<int>(capacity), s.heads, s.kv_heads, s.dim, 1.0f / sqrtf(static_cast<float>(s.dim)),
               static_cast<Bf16*>(p.o.data), p.o.stride, p.lse};
  const int pairs = (s.heads / s.kv_heads + 1) / 2;
  const auto ctas = static_cast<unsigned>(capacity * s.kv_heads * pairs);
  s.dim <= 128 ? launch<2>(a, ctas, context) : launch<4>(a, ctas, context);
}

} // namespace gdn::kernels
