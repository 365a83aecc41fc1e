// A CTA owns one tile of queries of two heads that share their keys, a warpgroup each, and walks the keys from the
// diagonal back to the start of the sequence, kKeys at a time. Scores, probabilities and output stay in registers;
// the scores of the next keys are made while these are weighted.
#include "kernels/attention/core_tiles.cuh"

namespace gdn::kernels {
namespace {

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

// Keys of a step; bytes of 64 columns of them; steps of keys or values that fit beside the queries.
template <int kTiles>
inline constexpr int kKeys = kTiles == 2 ? 128 : 96;
template <int kTiles>
inline constexpr int kImage = kKeys<kTiles> * 128;
template <int kTiles>
inline constexpr int kSlots = (kMaxSharedBytes - 1024 - 2 * kTiles * kTileBytes) / (kTiles * kImage<kTiles>);

template <int kTiles>
struct Shared {
  char q[2][kTiles][kTileBytes], keys[kSlots<kTiles>][kTiles][kImage<kTiles>]; // keys and values take turns
  std::uint64_t q_full, full[kSlots<kTiles>], empty[kSlots<kTiles>];
};

// The tile, its kv head, and the two query heads.
struct Place {
  GdnChunk chunk;
  int kv, head[2];
  int end; // keys seen by the tile's last row, from the start of the sequence
  __device__ explicit Place(const Args& a) {
    const int group = a.heads / a.kv_heads, pairs = (group + 1) / 2;
    const int index = a.capacity - 1 - static_cast<int>(blockIdx.x) / (a.kv_heads * pairs); // long rows of keys first
    kv = static_cast<int>(blockIdx.x) / pairs % a.kv_heads;
    const int pair = static_cast<int>(blockIdx.x) % pairs;
    head[0] = kv * group + 2 * pair;
    head[1] = 2 * pair + 1 < group ? head[0] + 1 : head[0]; // an odd one out is done twice, written once
    chunk = a.chunks[index];
    end = chunk.kind == GdnChunk::kTokens ? (index - a.offsets[chunk.sequence] + 1) * kChunk : 0;
  }
};

template <int kTiles>
__device__ void feed(const Args& a, Shared<kTiles>& s, const Place& at) {
  barrier_expect(&s.q_full, 2 * kTiles * kTileBytes);
  for (int i = 0; i < 2; ++i) load_head<kTiles>(s.q[i], &a.q, &s.q_full, at.head[i], at.chunk.first_token);
  Ring<kSlots<kTiles>> ring;
  const auto load = [&](const CUtensorMap* map, int token) {
    const int slot = ring.stage;
    barrier_wait(&s.empty[slot], ring.parity ^ 1);
    barrier_expect(&s.full[slot], kTiles * kImage<kTiles>);
    load_head<kTiles>(s.keys[slot], map, &s.full[slot], at.kv, token);
    ring.advance();
  };
  const int start = at.chunk.first_token + kChunk - at.end;
  int token = at.chunk.first_token + kChunk - kKeys<kTiles>;
  load(&a.k, token);
  for (; token > start; token -= kKeys<kTiles>) {
    load(&a.k, token - kKeys<kTiles>);
    load(&a.v, token);
  }
  load(&a.v, token);
}

template <int kTiles>
__device__ void compute(const Args& a, Shared<kTiles>& s, const Place& at) {
  constexpr int kWide = kKeys<kTiles>;
  constexpr std::uint32_t kSlot = kTiles * kImage<kTiles> >> 4, kNextImage = kImage<kTiles> >> 4;
  const Lane lane;
  const int me = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const std::uint32_t q = descriptor(smem_address(s.q[me])), k = descriptor(smem_address(s.keys)),
                      v = descriptor(smem_address(s.keys), kImage<kTiles>);
  const float scale = a.scale * kLog2e;
  float o[kTiles / 2][64] = {}, x[kWide / 2], top[2], sum[2], shrink[2];
  std::uint32_t p[kWide / 4];
  Ring<kSlots<kTiles>> ring;
  const auto slot_of = [&] { return __shfl_sync(~0u, ring.stage, 0); };
  const auto score = [&](int slot) { // x = q k^T
    barrier_wait(&s.full[slot], ring.parity);
    ring.advance();
    products_begin();
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i)
      product<Contract::kAlongRow, Contract::kAlongRow>(x, q + i / 4 * kNextTile + step_offset<Contract::kAlongRow>(i % 4),
                                                        k + slot * kSlot + i / 4 * kNextImage + step_offset<Contract::kAlongRow>(i % 4), i > 0);
    products_commit();
  };
  const auto weight = [&](int slot) { // o += p v
    barrier_wait(&s.full[slot], ring.parity);
    ring.advance();
    pin_all(o);
    products_begin();
#pragma unroll
    for (int half = 0; half < kTiles / 2; ++half)
#pragma unroll
      for (int i = 0; i < kWide / 16; ++i)
        product<Contract::kAcrossRows>(o[half], &p[4 * i], v + slot * kSlot + 2 * half * kNextImage + step_offset<Contract::kAcrossRows>(i));
    products_commit();
  };
  // x becomes 2^(scale (x - top)). The maximum that counts follows the true one only where that has grown by a factor
  // 2^8: sum and o are divided by the same power in the end.
  const auto exponentials = [&](bool fresh) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = x[2 * h];
#pragma unroll
      for (int n = 0; n < kWide / 8; ++n) most = fmaxf(most, fmaxf(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (fresh) {
        top[h] = most;
        sum[h] = 0.0f;
      } else {
        most = (most - top[h]) * scale > 8.0f ? most : top[h];
        shrink[h] = exp2_fast((top[h] - most) * scale);
        top[h] = most;
        sum[h] *= shrink[h];
      }
      const float shift = -top[h] * scale;
      float here = 0.0f;
#pragma unroll
      for (int n = 0; n < kWide / 8; ++n) {
        float &low = x[4 * n + 2 * h], &high = x[4 * n + 2 * h + 1];
        low = exp2_fast(fmaf(low, scale, shift));
        high = exp2_fast(fmaf(high, scale, shift));
        here += low + high;
      }
      sum[h] += here;
    }
  };
  const auto hide_before = [&](int keys) { // keys before the sequence
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i)
      if (8 * (i / 4) + 2 * lane.t + i % 2 < keys) x[i] = -INFINITY;
  };

  barrier_wait(&s.q_full, 0);
  int slot = slot_of();
  score(slot);
  products_wait<0>(x);
  warp_arrive(&s.empty[slot]);
#pragma unroll
  for (int i = 0; i < kWide / 2; ++i) // the diagonal; rows behind the sequence see nothing that matters
    if (8 * (i / 4) + 2 * lane.t + i % 2 > lane.row() + i % 4 / 2 * 8 + kWide - kChunk) x[i] = -INFINITY;
  int left = at.end - kWide; // keys not yet scored
  if (left < 0) hide_before(-left);
  exponentials(true);
  pack_operand(x, p);

#pragma unroll 1
  for (; left > 0; left -= kWide) {
    slot = slot_of();
    score(slot);
    const int values = slot_of();
    weight(values);
    products_wait<1>(x);
    warp_arrive(&s.empty[slot]);
    if (left < kWide) hide_before(kWide - left);
    exponentials(false);
    pin(x); // before the wait, not behind it
    products_wait<0>(p);
    pin_all(o);
    warp_arrive(&s.empty[values]);
    pack_operand(x, p);
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int half = 0; half < kTiles / 2; ++half)
#pragma unroll
        for (int i = 0; i < 64; ++i) o[half][i] *= shrink[i % 4 / 2];
    }
  }
  slot = slot_of();
  weight(slot);
  products_wait<0>(p);
  pin_all(o);

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
    for (int i = 0; i < kSlots<kTiles>; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 8 * kWarpArrivals);
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
  const int pairs = (s.heads / s.kv_heads + 1) / 2, keys = s.dim <= 128 ? kKeys<2> : kKeys<4>;
  const Args a{head_map("q", p.q, s.dim), head_map("k", p.k, s.dim, keys), head_map("v", p.v, s.dim, keys), s.table.chunks, s.table.offsets,
               static_cast<int>(capacity), s.heads, s.kv_heads, s.dim, 1.0f / sqrtf(static_cast<float>(s.dim)),
               static_cast<Bf16*>(p.o.data), p.o.stride, p.lse};
  const auto ctas = static_cast<unsigned>(capacity * s.kv_heads * pairs);
  s.dim <= 128 ? launch<2>(a, ctas, context) : launch<4>(a, ctas, context);
}

} // namespace gdn::kernels
