// Two passes that need no sums across CTAs. Keys and values: a CTA owns a tile of keys and walks the query heads
// of its group and the tiles of queries from the diagonal on; one warpgroup sums dv, the other dk, each making
// the probabilities it needs (transposed: keys are rows). Queries: a CTA owns a tile of queries of two heads and
// walks the keys up to the diagonal.
//
//   p = exp(s - lse);  dv = p^T d_o;  ds = p (d_o v^T - delta), delta = o . d_o;  dk = ds^T q;  dq = ds k
#include "kernels/attention/core_tiles.cuh"
#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

struct Args {
  CUtensorMap q, k, v, d_o;
  const GdnChunk* chunks;
  const std::int32_t* offsets;
  int capacity, heads, kv_heads, dim;
  float scale;
  const float2* rows; // [capacity, heads, 64]: (lse log2(e), delta); (inf, 0) behind the end
  Bf16 *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
  bool dq_adds, dk_adds, dv_adds;
};

// A warp a row of a (tile, head).
__global__ void __launch_bounds__(256) rows_kernel_of(Args a, Matrix o, Matrix d_o, const float* lse, float2* rows) {
  const int lane = threadIdx.x % 32;
  const std::int64_t index = (blockIdx.x * std::int64_t{256} + threadIdx.x) / 32; // (tile, head, row)
  if (index >= std::int64_t{a.capacity} * a.heads * kChunk) return;
  const int row = static_cast<int>(index % kChunk), head = static_cast<int>(index / kChunk % a.heads);
  const GdnChunk chunk = a.chunks[index / kChunk / a.heads];
  if (chunk.kind != GdnChunk::kTokens || row >= chunk.rows) {
    if (lane == 0) rows[index] = float2{INFINITY, 0.0f};
    return;
  }
  const std::int64_t token = chunk.first_token + row, first = std::int64_t{head} * a.dim;
  float delta = 0.0f;
  if (const int c = lane * 8; c < a.dim) {
    const Values<8> x = load_values<8>(o, token, first + c), d = load_values<8>(d_o, token, first + c);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta += x.x[i] * d.x[i];
  }
  delta = lane_sum<32>(delta);
  if (lane == 0) rows[index] = float2{lse[token * a.heads + head] * kLog2e, delta};
}

// ---------------------------------------------------------------------------- keys and values ----

constexpr int kStages = 2;

template <int kTiles>
struct KeyShared {
  char k[kTiles][kTileBytes], v[kTiles][kTileBytes];
  char q[kStages][kTiles][kTileBytes], d_o[kStages][kTiles][kTileBytes];
  float2 rows[kStages][kChunk];
  std::uint64_t kv_full, full[kStages], empty[kStages];
};

struct KeyPlace {
  GdnChunk chunk;
  int index, end; // in the table: this tile, behind the last of its sequence
  int kv;
  __device__ explicit KeyPlace(const Args& a) {
    index = static_cast<int>(blockIdx.x) / a.kv_heads;
    kv = static_cast<int>(blockIdx.x) % a.kv_heads;
    chunk = a.chunks[index];
    end = chunk.kind == GdnChunk::kTokens ? a.offsets[chunk.sequence + 1] : 0;
  }
};

template <int kTiles>
__device__ void feed_keys(const Args& a, KeyShared<kTiles>& s, const KeyPlace& at) {
  barrier_expect(&s.kv_full, 2 * kTiles * kTileBytes);
  load_head<kTiles>(s.k, &a.k, &s.kv_full, at.kv, at.chunk.first_token);
  load_head<kTiles>(s.v, &a.v, &s.kv_full, at.kv, at.chunk.first_token);
  const int group = a.heads / a.kv_heads;
  Ring<kStages> ring;
  for (int head = at.kv * group; head < (at.kv + 1) * group; ++head)
    for (int j = at.index; j < at.end; ++j, ring.advance()) {
      const int i = ring.stage, token = at.chunk.first_token + (j - at.index) * kChunk;
      barrier_wait(&s.empty[i], ring.parity ^ 1);
      barrier_expect(&s.full[i], 2 * kTiles * kTileBytes + kChunk * 8);
      load_head<kTiles>(s.q[i], &a.q, &s.full[i], head, token);
      load_head<kTiles>(s.d_o[i], &a.d_o, &s.full[i], head, token);
      load_bulk(s.rows[i], a.rows + (std::int64_t{j} * a.heads + head) * kChunk, kChunk * 8, &s.full[i]);
    }
}

// kKeys: the warpgroup that sums dk; else dv.
template <int kTiles, bool kKeys>
__device__ void compute_keys(const Args& a, KeyShared<kTiles>& s, const KeyPlace& at) {
  const Lane lane;
  const std::uint32_t k = descriptor(smem_address(s.k)), v = descriptor(smem_address(s.v)), q = descriptor(smem_address(s.q)),
                      d_o = descriptor(smem_address(s.d_o));
  const float scale = a.scale * kLog2e;
  float sum[kTiles / 2][64] = {};
  barrier_wait(&s.kv_full, 0);
  const int steps = (at.end - at.index) * (a.heads / a.kv_heads);
  int j = at.index;
  Ring<kStages> ring;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const int stage = __shfl_sync(~0u, ring.stage, 0);
    const std::uint32_t here = stage * kTiles * kNextTile;
    float x[32], z[32]; // s^T and (d_o v^T)^T: keys by queries
    barrier_wait(&s.full[stage], ring.parity);
    products_begin();
    scores<kTiles>(x, k, q + here);
    if constexpr (kKeys) scores<kTiles>(z, v, d_o + here);
    products_commit();
    if constexpr (kKeys) products_wait<0>(x, z);
    else products_wait<0>(x);

    std::uint32_t p[16];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 row = *reinterpret_cast<const float4*>(&s.rows[stage][8 * n + 2 * lane.t]); // of two queries
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = lane.row() + 8 * h, query = 8 * n + 2 * lane.t;
        float low = exp2_fast(x[4 * n + 2 * h] * scale - row.x), high = exp2_fast(x[4 * n + 2 * h + 1] * scale - row.z);
        if (j == at.index) {
          if (key > query) low = 0.0f;
          if (key > query + 1) high = 0.0f;
        }
        if constexpr (kKeys) {
          low *= z[4 * n + 2 * h] - row.y;
          high *= z[4 * n + 2 * h + 1] - row.w;
        }
        p[2 * n + h] = pack_bf16(low, high);
      }
    }
    pin_all(sum);
    products_begin();
    weighted_rows<kTiles>(sum, p, (kKeys ? q : d_o) + here);
    products_commit();
    products_wait<0>(p);
    pin_all(sum);
    warp_arrive(&s.empty[stage]);
    if (++j == at.end) j = at.index;
  }
  const float factor[2] = {kKeys ? a.scale : 1.0f, kKeys ? a.scale : 1.0f};
  const std::int64_t stride = kKeys ? a.dk_stride : a.dv_stride;
  write_head(sum, factor, (kKeys ? a.dk : a.dv) + at.chunk.first_token * stride + static_cast<std::int64_t>(at.kv) * a.dim, stride,
             at.chunk.rows, a.dim, kKeys ? a.dk_adds : a.dv_adds, lane);
}

template <int kTiles>
__global__ void __launch_bounds__(kAttentionThreads, 1) attention_keys_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<KeyShared<kTiles>*>(raw);
  const KeyPlace at(a);
  if (at.chunk.kind != GdnChunk::kTokens) return;
  if (threadIdx.x == 0) {
    barrier_init(&s.kv_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], 8 * kWarpArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 2 * kWarpgroup) feed_keys<kTiles>(a, s, at);
  } else {
    take_registers<240>();
    if (threadIdx.x < kWarpgroup) compute_keys<kTiles, false>(a, s, at);
    else compute_keys<kTiles, true>(a, s, at);
  }
}

// ------------------------------------------------------------------------------------ queries ----

template <int kTiles>
struct QueryShared {
  char q[2][kTiles][kTileBytes], d_o[2][kTiles][kTileBytes], k[kTiles][kTileBytes], v[kTiles][kTileBytes];
  std::uint64_t q_full, k_full, k_empty, v_full, v_empty;
};

struct QueryPlace { // as in the forward
  GdnChunk chunk;
  int index, first;
  int kv, head[2];
  __device__ explicit QueryPlace(const Args& a) {
    const int group = a.heads / a.kv_heads, pairs = (group + 1) / 2;
    index = a.capacity - 1 - static_cast<int>(blockIdx.x) / (a.kv_heads * pairs);
    kv = static_cast<int>(blockIdx.x) / pairs % a.kv_heads;
    const int pair = static_cast<int>(blockIdx.x) % pairs;
    head[0] = kv * group + 2 * pair;
    head[1] = 2 * pair + 1 < group ? head[0] + 1 : head[0];
    chunk = a.chunks[index];
    first = chunk.kind == GdnChunk::kTokens ? a.offsets[chunk.sequence] : 0;
  }
};

template <int kTiles>
__device__ void feed_queries(const Args& a, QueryShared<kTiles>& s, const QueryPlace& at) {
  barrier_expect(&s.q_full, 4 * kTiles * kTileBytes);
  for (int i = 0; i < 2; ++i) {
    load_head<kTiles>(s.q[i], &a.q, &s.q_full, at.head[i], at.chunk.first_token);
    load_head<kTiles>(s.d_o[i], &a.d_o, &s.q_full, at.head[i], at.chunk.first_token);
  }
  int token = at.chunk.first_token - (at.index - at.first) * kChunk;
  std::uint32_t parity = 0;
  for (int j = at.first; j <= at.index; ++j, token += kChunk, parity ^= 1) {
    barrier_wait(&s.k_empty, parity ^ 1);
    barrier_expect(&s.k_full, kTiles * kTileBytes);
    load_head<kTiles>(s.k, &a.k, &s.k_full, at.kv, token);
    barrier_wait(&s.v_empty, parity ^ 1);
    barrier_expect(&s.v_full, kTiles * kTileBytes);
    load_head<kTiles>(s.v, &a.v, &s.v_full, at.kv, token);
  }
}

template <int kTiles>
__device__ void compute_queries(const Args& a, QueryShared<kTiles>& s, const QueryPlace& at) {
  const Lane lane;
  const int me = threadIdx.x / kWarpgroup, head = at.head[me];
  const std::uint32_t q = descriptor(smem_address(s.q[me])), d_o = descriptor(smem_address(s.d_o[me])),
                      k = descriptor(smem_address(s.k)), v = descriptor(smem_address(s.v));
  const float scale = a.scale * kLog2e;
  float2 row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row[h] = a.rows[(std::int64_t{at.index} * a.heads + head) * kChunk + lane.row() + 8 * h];
  float sum[kTiles / 2][64] = {};
  barrier_wait(&s.q_full, 0);
  std::uint32_t parity = 0;
  for (int j = at.first; j <= at.index; ++j, parity ^= 1) {
    float x[32], z[32];
    barrier_wait(&s.k_full, parity);
    products_begin();
    scores<kTiles>(x, q, k);
    products_commit();
    barrier_wait(&s.v_full, parity);
    products_begin();
    scores<kTiles>(z, d_o, v);
    products_commit();
    products_wait<0>(x, z);
    warp_arrive(&s.v_empty);
    std::uint32_t p[16];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = lane.row() + 8 * h, key = 8 * n + 2 * lane.t;
        float low = exp2_fast(x[4 * n + 2 * h] * scale - row[h].x), high = exp2_fast(x[4 * n + 2 * h + 1] * scale - row[h].x);
        if (j == at.index) {
          if (key > query) low = 0.0f;
          if (key + 1 > query) high = 0.0f;
        }
        p[2 * n + h] = pack_bf16(low * (z[4 * n + 2 * h] - row[h].y), high * (z[4 * n + 2 * h + 1] - row[h].y));
      }
    pin_all(sum);
    products_begin();
    weighted_rows<kTiles>(sum, p, k);
    products_commit();
    products_wait<0>(p);
    pin_all(sum);
    warp_arrive(&s.k_empty);
  }
  if (me == 1 && head == at.head[0]) return;
  const float factor[2] = {a.scale, a.scale};
  write_head(sum, factor, a.dq + at.chunk.first_token * a.dq_stride + static_cast<std::int64_t>(head) * a.dim, a.dq_stride, at.chunk.rows,
             a.dim, a.dq_adds, lane);
}

template <int kTiles>
__global__ void __launch_bounds__(kAttentionThreads, 1) attention_queries_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<QueryShared<kTiles>*>(raw);
  const QueryPlace at(a);
  if (at.chunk.kind != GdnChunk::kTokens) return;
  if (threadIdx.x == 0) {
    barrier_init(&s.q_full, 1);
    barrier_init(&s.k_full, 1);
    barrier_init(&s.v_full, 1);
    barrier_init(&s.k_empty, 8 * kWarpArrivals);
    barrier_init(&s.v_empty, 8 * kWarpArrivals);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 2 * kWarpgroup) feed_queries<kTiles>(a, s, at);
  } else {
    take_registers<240>();
    compute_queries<kTiles>(a, s, at);
  }
}

template <class Shared, class Kernel>
void launch(Kernel kernel, const Args& a, unsigned ctas, const char* name, const LaunchContext& context) {
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<ctas, kAttentionThreads, sizeof(Shared), context.stream>>>(a);
  check_launch(name);
}

template <int kTiles>
void launch_both(const Args& a, const LaunchContext& context) {
  const unsigned tiles = static_cast<unsigned>(a.capacity * a.kv_heads), pairs = static_cast<unsigned>((a.heads / a.kv_heads + 1) / 2);
  launch<KeyShared<kTiles>>(attention_keys_kernel<kTiles>, a, tiles, "attention_keys_kernel", context);
  launch<QueryShared<kTiles>>(attention_queries_kernel<kTiles>, a, tiles * pairs, "attention_queries_kernel", context);
}

} // namespace

void attention_backward(const AttentionBackwardParams& p, const LaunchContext& context) {
  const AttentionShape& s = p.shape;
  check_attention(s, "attention_backward");
  require_scratch(context, attention_backward_scratch(s.tokens, s.sequences, s.heads), "attention_backward");
  if (s.tokens == 0) return;
  auto* rows = static_cast<float2*>(context.scratch);
  const auto bf16 = [](const Gradient& g) { return static_cast<Bf16*>(g.to.data); };
  const Args a{head_map("q", p.q, s.dim), head_map("k", p.k, s.dim), head_map("v", p.v, s.dim), head_map("d_o", p.d_o, s.dim),
               s.table.chunks, s.table.offsets, static_cast<int>(gdn_chunk_capacity(s.tokens, s.sequences)), s.heads, s.kv_heads, s.dim,
               1.0f / sqrtf(static_cast<float>(s.dim)), rows, bf16(p.dq), bf16(p.dk), bf16(p.dv), p.dq.to.stride, p.dk.to.stride,
               p.dv.to.stride, p.dq.accumulate, p.dk.accumulate, p.dv.accumulate};
  const std::int64_t warps = std::int64_t{a.capacity} * a.heads * kChunk;
  rows_kernel_of<<<static_cast<unsigned>((warps * 32 + 255) / 256), 256, 0, context.stream>>>(a, p.o, p.d_o, p.lse, rows);
  check_launch("attention rows");
  s.dim <= 128 ? launch_both<2>(a, context) : launch_both<4>(a, context);
}

} // namespace gdn::kernels
