// Two passes, without atomics and without sums in memory. Keys and values: a cluster of CTAs owns a tile of keys, each CTA
// a share of the group's heads; it walks the tiles of queries from the last one, which all CTAs of a sequence share, back
// to the diagonal, in each all its heads; one warpgroup makes the probabilities and sums dv, the other makes their gradient
// and sums dk (transposed: keys are rows). Queries: a CTA owns a tile of queries of two heads and walks the keys up to the
// diagonal.
//
//   p = exp(s - lse);  dv = p^T d_o;  ds = p (d_o v^T - delta), delta = o . d_o;  dk = ds^T q;  dq = ds k
#include <numeric>

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

inline constexpr int kQueryStages = 3; // they are needed a step earlier than d_o

template <int kTiles>
struct KeyShared {
  char k[kTiles][kTileBytes], v[kTiles - 1][kTileBytes];
  char q[kQueryStages][kTiles][kTileBytes], d_o[2][kTiles][kTileBytes];
  union {
    char last_v[kTileBytes]; // until the warpgroup that needs it holds it in registers
    uint4 p[4][kWarpgroup];  // probabilities, each thread's own, from one warpgroup to the other
  };
  float2 rows[kQueryStages][kChunk];
  std::uint64_t kv_full, q_full[kQueryStages], q_empty[kQueryStages], d_o_full[2], d_o_empty[2], p_full, p_empty;
};

struct KeyPlace {
  GdnChunk chunk;
  int index, end; // in the table: this tile, behind the last of its sequence
  int kv, part, first_head, heads;
  __device__ KeyPlace(const Args& a, int parts) {
    const int tile = static_cast<int>(blockIdx.x) / parts;
    part = static_cast<int>(blockIdx.x) % parts;
    index = tile / a.kv_heads;
    kv = tile % a.kv_heads;
    heads = a.heads / a.kv_heads / parts;
    first_head = (kv * parts + part) * heads;
    chunk = a.chunks[index];
    end = chunk.kind == GdnChunk::kTokens ? a.offsets[chunk.sequence + 1] : 0;
  }
};

// Adds the sums of the cluster's other CTAs, in order, to the first one's: through their shared memory, which nothing
// else uses any more. True in the CTA that has them all.
template <int kTiles, int kParts>
__device__ bool gather(float (&sum)[kTiles / 2][64], KeyShared<kTiles>& s, int part) {
  constexpr int kFours = 8 * kTiles, kStride = 2 * kWarpgroup * 16;
  static_assert(kFours * kStride <= sizeof(KeyShared<kTiles>));
  const std::uint32_t room = smem_address(&s) + threadIdx.x * 16;
  if (part > 0) {
    named_barrier(1, 2 * kWarpgroup); // both warpgroups have read all tiles
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float* const x = &sum[i / 16][i % 16 * 4];
      store_shared(room + i * kStride, float4{x[0], x[1], x[2], x[3]});
    }
  }
  cluster_barrier();
  if (part == 0) {
#pragma unroll 1
    for (int other = 1; other < kParts; ++other)
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 more = load_shared_of(other, room + i * kStride);
        float* const x = &sum[i / 16][i % 16 * 4];
        x[0] += more.x, x[1] += more.y, x[2] += more.z, x[3] += more.w;
      }
  }
  cluster_barrier(); // nobody leaves while its sums are read
  return part == 0;
}

template <int kTiles>
__device__ void feed_keys(const Args& a, KeyShared<kTiles>& s, const KeyPlace& at) {
  barrier_expect(&s.kv_full, 2 * kTiles * kTileBytes);
  load_head<kTiles>(s.k, &a.k, &s.kv_full, at.kv, at.chunk.first_token);
  load_head<kTiles - 1>(s.v, &a.v, &s.kv_full, at.kv, at.chunk.first_token);
  load_box(s.last_v, &a.v, &s.kv_full, 64 * (kTiles - 1), at.kv, at.chunk.first_token);
  const int steps = (at.end - at.index) * at.heads;
  const auto token = [&](int step) { return at.chunk.first_token + (at.end - 1 - at.index - step / at.heads) * kChunk; };
  Ring<kQueryStages> queries;
  Ring<2> gradients;
  for (int step = 0; step <= steps; ++step) {
    if (step < steps) {
      const int i = queries.stage, head = at.first_head + step % at.heads;
      barrier_wait(&s.q_empty[i], queries.parity ^ 1);
      barrier_expect(&s.q_full[i], kTiles * kTileBytes + kChunk * 8);
      load_head<kTiles>(s.q[i], &a.q, &s.q_full[i], head, token(step));
      load_bulk(s.rows[i], a.rows + (std::int64_t{at.end - 1 - step / at.heads} * a.heads + head) * kChunk, kChunk * 8, &s.q_full[i]);
      queries.advance();
    }
    if (step > 0) {
      const int i = gradients.stage;
      barrier_wait(&s.d_o_empty[i], gradients.parity ^ 1);
      barrier_expect(&s.d_o_full[i], kTiles * kTileBytes);
      load_head<kTiles>(s.d_o[i], &a.d_o, &s.d_o_full[i], at.first_head + (step - 1) % at.heads, token(step - 1));
      gradients.advance();
    }
  }
}

// A thread's probabilities, as it or its like in the other warpgroup left them.
__device__ __forceinline__ void take(std::uint32_t (&p)[16], const uint4 (&from)[4][kWarpgroup], int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = from[i][thread];
    p[4 * i] = four.x, p[4 * i + 1] = four.y, p[4 * i + 2] = four.z, p[4 * i + 3] = four.w;
  }
}

// The warpgroup that sums dv. It makes the probabilities of the next step, for both, beside the products of this one.
template <int kTiles, int kParts>
__device__ void sum_values(const Args& a, KeyShared<kTiles>& s, const KeyPlace& at) {
  const Lane lane;
  const int thread = threadIdx.x % kWarpgroup;
  const std::uint32_t k = descriptor(smem_address(s.k)), q = descriptor(smem_address(s.q)), d_o = descriptor(smem_address(s.d_o));
  const float scale = a.scale * kLog2e;
  const int steps = (at.end - at.index) * at.heads;
  float sum[kTiles / 2][64] = {}, x[32];
  std::uint32_t p[16];
  const auto score = [&](int stage, std::uint32_t parity) { // x = k q^T: keys by queries
    barrier_wait(&s.q_full[stage], parity);
    products_begin();
    scores<kTiles>(x, k, q + stage * kTiles * kNextTile);
    products_commit();
  };
  const auto weight = [&](int stage, std::uint32_t parity) { // sum += p d_o
    barrier_wait(&s.d_o_full[stage], parity);
    pin_all(sum);
    products_begin();
#pragma unroll
    for (int half = 0; half < 2; ++half) weighted_rows<kTiles>(sum, p, d_o + stage * kTiles * kNextTile, half);
    products_commit();
  };
  const auto probabilities = [&](int stage, std::uint32_t turn, bool diagonal) { // of x, for the next weights and the other warpgroup
    if (diagonal) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (lane.row() + i % 4 / 2 * 8 > 8 * (i / 4) + 2 * lane.t + i % 2) x[i] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 row = *reinterpret_cast<const float4*>(&s.rows[stage][8 * n + 2 * lane.t]); // of two queries
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; ++i) x[i] = exp2_fast(fmaf(x[i], scale, -(i % 2 == 0 ? row.x : row.z)));
    }
    barrier_wait(&s.p_empty, turn); // the first time, for the last of v to be read
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s.p[i][thread] = uint4{pack_bf16(x[8 * i], x[8 * i + 1]), pack_bf16(x[8 * i + 2], x[8 * i + 3]),
                             pack_bf16(x[8 * i + 4], x[8 * i + 5]), pack_bf16(x[8 * i + 6], x[8 * i + 7])};
    warp_arrive(&s.p_full);
    warp_arrive(&s.q_empty[stage]);
  };
  barrier_wait(&s.kv_full, 0);
  score(0, 0);
  products_wait<0>(x);
  probabilities(0, 0, steps == at.heads);
  take(p, s.p, thread);
  Ring<kQueryStages> queries;
  Ring<2> gradients;
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    queries.advance();
    const int stage = __shfl_sync(~0u, gradients.stage, 0), following = __shfl_sync(~0u, queries.stage, 0);
    score(following, queries.parity);
    weight(stage, gradients.parity);
    products_wait<1>(x);
    probabilities(following, step & 1, step >= steps - at.heads);
    products_wait<0>(p);
    pin_all(sum);
    warp_arrive(&s.d_o_empty[stage]);
    take(p, s.p, thread); // not from x: its registers would count as written among the products
    gradients.advance();
  }
  weight(__shfl_sync(~0u, gradients.stage, 0), gradients.parity);
  products_wait<0>(p);
  pin_all(sum);
  if constexpr (kParts > 1)
    if (!gather<kTiles, kParts>(sum, s, at.part)) return;
  const float factor[2] = {1.0f, 1.0f};
  write_head(sum, factor, a.dv + at.chunk.first_token * a.dv_stride + static_cast<std::int64_t>(at.kv) * a.dim, a.dv_stride, at.chunk.rows,
             a.dim, a.dv_adds, lane);
}

// The warpgroup that sums dk. The products of a step and the first of the next follow each other without a gap.
template <int kTiles, int kParts>
__device__ void sum_keys(const Args& a, KeyShared<kTiles>& s, const KeyPlace& at) {
  const Lane lane;
  const int thread = threadIdx.x % kWarpgroup;
  const std::uint32_t v = descriptor(smem_address(s.v)), q = descriptor(smem_address(s.q)), d_o = descriptor(smem_address(s.d_o));
  const int steps = (at.end - at.index) * at.heads;
  float sum[kTiles / 2][64] = {}, z[32];
  std::uint32_t last_v[16]; // the operand of the last four steps of a product
  const auto score_gradient = [&](int stage, std::uint32_t parity) { // z = v d_o^T: keys by queries
    barrier_wait(&s.d_o_full[stage], parity);
    products_begin();
    const std::uint32_t rows = d_o + stage * kTiles * kNextTile;
    scores<kTiles - 1>(z, v, rows);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAlongRow>(z, &last_v[4 * k], rows + (kTiles - 1) * kNextTile + step_offset<Contract::kAlongRow>(k));
    products_commit();
  };
  barrier_wait(&s.kv_full, 0);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    last_v[i] = *reinterpret_cast<const std::uint32_t*>(s.last_v + in_tile(lane.row() + 8 * (i % 2), i / 2) + 4 * lane.t);
  warp_arrive(&s.p_empty);
  score_gradient(0, 0);
  products_wait<0>(z);
  Ring<kQueryStages> queries;
  Ring<2> gradients;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = __shfl_sync(~0u, queries.stage, 0);
    warp_arrive(&s.d_o_empty[__shfl_sync(~0u, gradients.stage, 0)]);
    gradients.advance();
    barrier_wait(&s.q_full[stage], queries.parity);
    queries.advance();
    barrier_wait(&s.p_full, step & 1);
    std::uint32_t p[16];
    take(p, s.p, thread);
    warp_arrive(&s.p_empty);
    pin_all(sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) { // 32 queries: the products of the first beside the arithmetic of the second
      pin(z);
#pragma unroll
      for (int n = 4 * half; n < 4 * half + 4; ++n) {
        const float4 row = *reinterpret_cast<const float4*>(&s.rows[stage][8 * n + 2 * lane.t]); // of two queries
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t& pair = p[2 * n + h];
          pair = pack_bf16(bf16_low(pair) * (z[4 * n + 2 * h] - row.y), bf16_high(pair) * (z[4 * n + 2 * h + 1] - row.w));
        }
      }
      products_begin();
      weighted_rows<kTiles>(sum, p, q + stage * kTiles * kNextTile, half);
      products_commit();
    }
    if (step + 1 < steps) {
      score_gradient(__shfl_sync(~0u, gradients.stage, 0), gradients.parity);
      products_wait<1>(p);
    } else {
      products_wait<0>(p);
    }
    pin_all(sum);
    warp_arrive(&s.q_empty[stage]);
    products_wait<0>(z);
  }
  if constexpr (kParts > 1)
    if (!gather<kTiles, kParts>(sum, s, at.part)) return;
  const float factor[2] = {a.scale, a.scale};
  write_head(sum, factor, a.dk + at.chunk.first_token * a.dk_stride + static_cast<std::int64_t>(at.kv) * a.dim, a.dk_stride, at.chunk.rows,
             a.dim, a.dk_adds, lane);
}

template <int kTiles, int kParts>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(kAttentionThreads, 1) attention_keys_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<KeyShared<kTiles>*>(raw);
  const KeyPlace at(a, kParts);
  if (at.chunk.kind != GdnChunk::kTokens) return;
  if (threadIdx.x == 0) {
    barrier_init(&s.kv_full, 1);
    for (auto& full : s.q_full) barrier_init(&full, 1);
    for (auto& full : s.d_o_full) barrier_init(&full, 1);
    for (auto& empty : s.q_empty) barrier_init(&empty, 8 * kWarpArrivals);
    for (auto& empty : s.d_o_empty) barrier_init(&empty, 8 * kWarpArrivals);
    for (auto* exchange : {&s.p_full, &s.p_empty}) barrier_init(exchange, 4 * kWarpArrivals);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 2 * kWarpgroup) feed_keys<kTiles>(a, s, at);
  } else {
    take_registers<240>();
    if (threadIdx.x < kWarpgroup) sum_values<kTiles, kParts>(a, s, at);
    else sum_keys<kTiles, kParts>(a, s, at);
  }
}

// ------------------------------------------------------------------------------------ queries ----

template <int kTiles>
struct QueryShared {
  char q[2][kTiles][kTileBytes], d_o[2][kTiles][kTileBytes], k[2][kTiles][kTileBytes], v[kTiles][kTileBytes];
  std::uint64_t q_full, k_full[2], k_empty[2], v_full, v_empty;
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
  Ring<2> ring;
  std::uint32_t parity = 0;
  for (int j = at.first; j <= at.index; ++j, token += kChunk, ring.advance(), parity ^= 1) {
    const int i = ring.stage;
    barrier_wait(&s.k_empty[i], ring.parity ^ 1);
    barrier_expect(&s.k_full[i], kTiles * kTileBytes);
    load_head<kTiles>(s.k[i], &a.k, &s.k_full[i], at.kv, token);
    barrier_wait(&s.v_empty, parity ^ 1);
    barrier_expect(&s.v_full, kTiles * kTileBytes);
    load_head<kTiles>(s.v, &a.v, &s.v_full, at.kv, token);
  }
}

template <int kTiles>
__device__ void compute_queries(const Args& a, QueryShared<kTiles>& s, const QueryPlace& at) {
  const Lane lane;
  const int me = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0), head = at.head[me];
  const std::uint32_t q = descriptor(smem_address(s.q[me])), d_o = descriptor(smem_address(s.d_o[me])),
                      k = descriptor(smem_address(s.k)), v = descriptor(smem_address(s.v));
  const float scale = a.scale * kLog2e;
  float2 row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row[h] = a.rows[(std::int64_t{at.index} * a.heads + head) * kChunk + lane.row() + 8 * h];
  float sum[kTiles / 2][64] = {}, x[32], z[32];
  const auto score = [&](int stage, std::uint32_t parity) { // x = q k^T
    barrier_wait(&s.k_full[stage], parity);
    products_begin();
    scores<kTiles>(x, q, k + stage * kTiles * kNextTile);
    products_commit();
  };
  const auto score_gradient = [&](std::uint32_t parity) { // z = d_o v^T
    barrier_wait(&s.v_full, parity);
    products_begin();
    scores<kTiles>(z, d_o, v);
    products_commit();
  };
  const auto probabilities = [&](bool diagonal) { // from x while z is being made
    products_wait<1>(x);
    if (diagonal) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (8 * (i / 4) + 2 * lane.t + i % 2 > lane.row() + i % 4 / 2 * 8) x[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = exp2_fast(fmaf(x[i], scale, -row[i % 4 / 2].x));
    pin(x); // before the wait, not behind it
    products_wait<0>(z);
    warp_arrive(&s.v_empty);
  };
  std::uint32_t p[16];
  const auto weight = [&](int stage) { // sum += ds k, the first half's products beside the arithmetic of the second
    pin_all(sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pin(z);
#pragma unroll
      for (int i = 8 * half; i < 8 * half + 8; ++i)
        p[i] = pack_bf16(x[2 * i] * (z[2 * i] - row[i % 2].y), x[2 * i + 1] * (z[2 * i + 1] - row[i % 2].y));
      products_begin();
      weighted_rows<kTiles>(sum, p, k + stage * kTiles * kNextTile, half);
      products_commit();
    }
  };
  barrier_wait(&s.q_full, 0);
  score(0, 0);
  score_gradient(0);
  probabilities(at.first == at.index);
  Ring<2> ring;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int j = at.first; j < at.index; ++j) {
    const int stage = __shfl_sync(~0u, ring.stage, 0);
    ring.advance();
    parity ^= 1;
    weight(stage);
    score(__shfl_sync(~0u, ring.stage, 0), ring.parity);
    products_wait<1>(p);
    pin_all(sum);
    warp_arrive(&s.k_empty[stage]);
    score_gradient(parity);
    probabilities(j + 1 == at.index);
  }
  weight(__shfl_sync(~0u, ring.stage, 0));
  products_wait<0>(p);
  pin_all(sum);
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
    barrier_init(&s.v_full, 1);
    barrier_init(&s.v_empty, 8 * kWarpArrivals);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.k_empty[i], 8 * kWarpArrivals);
    }
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
void launch(Kernel kernel, const Args& a, std::int64_t ctas, const char* name, const LaunchContext& context) {
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<static_cast<unsigned>(ctas), kAttentionThreads, sizeof(Shared), context.stream>>>(a);
  check_launch(name);
}

template <int kTiles, int kParts>
void launch_keys(const Args& a, const LaunchContext& context) {
  launch<KeyShared<kTiles>>(attention_keys_kernel<kTiles, kParts>, a, std::int64_t{a.capacity} * a.kv_heads * kParts, "attention_keys_kernel", context);
}

// The first tile of keys walks all queries of its sequence: CTAs share it, or a single sequence of few kv heads leaves
// half of the card idle. How many depends on the heads alone, since sums of other shares have other bits.
template <int kTiles>
void launch_both(const Args& a, const LaunchContext& context) {
  const int group = a.heads / a.kv_heads;
  switch (std::gcd(group, a.kv_heads == 1 ? 4 : a.kv_heads < 4 ? 2 : 1)) {
  case 4: launch_keys<kTiles, 4>(a, context); break;
  case 2: launch_keys<kTiles, 2>(a, context); break;
  default: launch_keys<kTiles, 1>(a, context);
  }
  launch<QueryShared<kTiles>>(attention_queries_kernel<kTiles>, a, std::int64_t{a.capacity} * a.kv_heads * ((group + 1) / 2), "attention_queries_kernel", context);
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
