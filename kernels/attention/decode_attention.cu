// Reading the cache is all the time there is. A cluster of eight CTAs owns a token and up to eight query heads of one kv
// head, and divides its keys into 32 runs, one a warp, 16 keys at a time:
//   scores^T [16 keys, 8 heads] = K q^T,   o^T [dim, 8 heads] += V^T p^T
// on tensor cores, whose operands are what the lanes have read: columns of K and q in an order of their own, V^T by
// putting two keys of a lane side by side. Maxima, sums and outputs meet at the end: lanes by shuffles, warps and CTAs
// through shared memory.
#include <cooperative_groups.h>

#include "kernels/attention/decode_attention.h"
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"

namespace gdn::kernels {
namespace {

constexpr int kSplits = 8; // CTAs of a cluster
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kHeads = 8; // of a cluster
constexpr int kKeys = 16; // of a warp at a time
constexpr float kNone = -1e30f; // the maximum of no keys: finite, so that differences are

// A share of the keys: maxima and sums of exponentials (to the base 2), and outputs not yet divided by the sums.
template <int kDim>
struct Partial {
  float most[kHeads], sum[kHeads], o[kHeads][kDim];
};

// d += a b, [16, 8] += [16, 16] [16, 8].
__device__ __forceinline__ void product(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                        std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two values of a row of an 8 x 8 matrix, for those of its transpose.
__device__ __forceinline__ std::uint32_t transposed(float low, float high) {
  std::uint32_t pair, out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}
// Over the eight lanes with the same lane % 4.
template <class F>
__device__ __forceinline__ float over_rows(float x, F combine) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x = combine(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

template <int kDim> // at least dim
__global__ void __cluster_dims__(kSplits, 1, 1) __launch_bounds__(kThreads, 2)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p, float scale) {
  using Share = Partial<kDim>;
  using Raw = RawVector<8>;
  __shared__ Share of_warp[kWarps], of_cta;
  const auto cluster = cooperative_groups::this_cluster();
  const int group = p.heads / p.kv_heads, parts = (group + kHeads - 1) / kHeads;
  const std::int64_t item = blockIdx.x / kSplits;
  const int first_head = static_cast<int>(item % parts) * kHeads; // of the group
  const int kv_head = static_cast<int>(item / parts % p.kv_heads);
  const std::int64_t token = item / parts / p.kv_heads;
  const int heads = min(kHeads, group - first_head), head = kv_head * group + first_head;
  const int split = blockIdx.x % kSplits, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t slot = p.at.slots[token];
  Bf16* const out = static_cast<Bf16*>(p.o.data) + token * p.o.stride + std::int64_t{head} * p.dim;
  if (slot < 0) { // all CTAs of the cluster
    for (int i = split * kThreads + threadIdx.x; i < heads * p.dim; i += kSplits * kThreads) out[i].bits = 0;
    if (p.lse != nullptr && split == 0 && threadIdx.x < heads) p.lse[token * p.heads + head + threadIdx.x] = 0.0f;
    return;
  }

  const std::int64_t keys = std::int64_t{p.at.positions[token]} + 1;
  constexpr std::int64_t kRuns = kSplits * kWarps;
  const std::int64_t run = (keys + kRuns * kKeys - 1) / (kRuns * kKeys) * kKeys;
  const std::int64_t begin = min(keys, (split * kWarps + warp) * run), end = min(keys, begin + run);
  const int row = lane / 4, quad = lane % 4; // of fragments
  const std::int64_t stride = std::int64_t{p.kv_heads} * p.dim, origin = slot * p.cache.capacity * stride + std::int64_t{kv_head} * p.dim;

  // Lane (row, quad) holds columns 32 i + 8 quad .. + 8: of head `row` here, of keys `row` and `row` + 8 below.
  Raw q[kDim / 32];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    const int column = 32 * i + 8 * quad;
    const bool there = row < heads && column < p.dim;
    q[i] = there ? Raw::load(static_cast<const Bf16*>(p.q.data) + token * p.q.stride + std::int64_t{head + row} * p.dim + column, true) : Raw::zero();
  }
  float o[kDim / 16][4] = {};                       // of heads 2 quad and 2 quad + 1
  float most[2] = {kNone, kNone}, sum[2] = {0, 0}; // of these; sums of the lane's keys
  for (std::int64_t first = begin; first < end; first += kKeys) {
    auto load = [&](const Bf16* cache, int key, int column) {
      const bool there = first + key < end && column < p.dim;
      return there ? Raw::load(cache + origin + (first + key) * stride + column, true) : Raw::zero();
    };
    Raw k[2][kDim / 32], v[4][kDim / 64]; // v: keys 2 quad, 2 quad + 1, and both + 8; columns 64 i + 8 row .. + 8
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) k[j][i] = load(p.cache.keys, row + 8 * j, 32 * i + 8 * quad);
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j][i] = load(p.cache.values, 2 * quad + j % 2 + 8 * (j / 2), 64 * i + 8 * row);

    float score[4] = {}; // [key row, head 2 quad], [row, + 1], [row + 8, 2 quad], [row + 8, + 1]
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
#pragma unroll
      for (int w = 0; w < 4; w += 2)
        product(score, k[0][i].words[w], k[1][i].words[w], k[0][i].words[w + 1], k[1][i].words[w + 1], q[i].words[w], q[i].words[w + 1]);
    const bool there[2] = {first + row < end, first + row + 8 < end};
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = most[h];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (there[j]) highest = fmaxf(highest, score[2 * j + h] * scale);
      highest = over_rows(highest, [](float a, float b) { return fmaxf(a, b); });
      shrink[h] = exp2f(most[h] - highest);
      most[h] = highest;
      sum[h] *= shrink[h];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        score[2 * j + h] = there[j] ? exp2f(score[2 * j + h] * scale - highest) : 0.0f;
        sum[h] += score[2 * j + h];
      }
    }
    const std::uint32_t p0 = transposed(score[0], score[1]), p1 = transposed(score[2], score[3]);
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) { // rows of the tile: columns 64 i + 8 row + 2 w, and behind them those + 1
        float(&tile)[4] = o[4 * i + w];
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[e] *= shrink[e % 2];
        const std::uint32_t a = v[0][i].words[w], b = v[1][i].words[w], c = v[2][i].words[w], d = v[3][i].words[w];
        product(tile, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632), p0, p1);
      }
  }

  Share& mine = of_warp[warp];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = over_rows(sum[h], [](float a, float b) { return a + b; });
    if (row == 0) {
      mine.most[2 * quad + h] = most[h];
      mine.sum[2 * quad + h] = total;
    }
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) mine.o[2 * quad + h][i / 4 * 64 + 8 * row + 2 * (i % 4) + e] = o[i][2 * e + h];
  }
  __syncthreads();
  auto merge = [](auto&& share, int count, int h, int c, float& highest, float& total, float& x) {
    highest = kNone;
    for (int i = 0; i < count; ++i) highest = fmaxf(highest, share(i).most[h]);
    total = x = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float shrink = exp2f(share(i).most[h] - highest);
      total += share(i).sum[h] * shrink;
      x += share(i).o[h][c] * shrink;
    }
  };
  for (int i = threadIdx.x; i < kHeads * kDim; i += kThreads) {
    const int h = i / kDim, c = i % kDim;
    float highest, total, x;
    merge([&](int w) -> const Share& { return of_warp[w]; }, kWarps, h, c, highest, total, x);
    of_cta.o[h][c] = x;
    if (c == 0) {
      of_cta.most[h] = highest;
      of_cta.sum[h] = total;
    }
  }
  cluster.sync();
  for (int i = split * kThreads + threadIdx.x; i < heads * kDim; i += kSplits * kThreads) {
    const int h = i / kDim, c = i % kDim;
    float highest, total, x;
    merge([&](int s) -> const Share& { return *cluster.map_shared_rank(&of_cta, s); }, kSplits, h, c, highest, total, x);
    if (c < p.dim) out[h * p.dim + c].bits = RowVector<8>::narrow(x / total);
    if (c == 0 && p.lse != nullptr) p.lse[token * p.heads + head + h] = (highest + log2f(total)) * 0.69314718f;
  }
  cluster.sync(); // nobody leaves while its share is read
}

struct AppendParams {
  CachedTokens at;
  Matrix k, v;
  AttentionCache cache;
};

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p, std::int64_t eights) {
  const std::int64_t index = blockIdx.x * std::int64_t{kThreads} + threadIdx.x, token = index / eights, column = index % eights * 8;
  if (token >= p.at.tokens) return;
  const std::int64_t slot = p.at.slots[token];
  if (slot < 0) return;
  const std::int64_t to = (slot * p.cache.capacity + p.at.positions[token]) * p.k.cols + column;
  auto move = [&](const Matrix& from, Bf16* cache) {
    *reinterpret_cast<uint4*>(cache + to) = *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(from.data) + token * from.stride + column);
  };
  move(p.k, p.cache.keys);
  move(p.v, p.cache.values);
}

bool in_eights(const Matrix& m) { return m.dtype == DType::BF16 && m.cols % 8 == 0 && vector_rows(m.data, m.rows > 1 ? m.stride : 0, 8); }
bool on_16_bytes(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

template <int kDim>
void launch(const DecodeAttentionParams& p, const LaunchContext& context) {
  const int parts = (p.heads / p.kv_heads + kHeads - 1) / kHeads;
  const auto ctas = static_cast<unsigned>(kSplits * p.at.tokens * p.kv_heads * parts);
  const float scale = 1.44269504f / sqrtf(static_cast<float>(p.dim)); // exponentials to the base 2
  decode_attention_kernel<kDim><<<ctas, kThreads, 0, context.stream>>>(p, scale);
  check_launch("decode_attention_kernel");
}

} // namespace

void append_to_cache(const CachedTokens& at, const Matrix& k, const Matrix& v, const AttentionCache& cache, const LaunchContext& context) {
  if (!in_eights(k) || !in_eights(v) || k.cols != v.cols || k.rows != at.tokens || v.rows != at.tokens || !on_16_bytes(cache.keys) || !on_16_bytes(cache.values))
    refuse("append_to_cache", {{"tokens", at.tokens}, {"rows", k.rows}, {"columns", k.cols}}, "bf16, a row a token, columns in eights, rows on 16 bytes");
  const std::int64_t threads = at.tokens * (k.cols / 8);
  if (threads == 0) return;
  append_kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>({at, k, v, cache}, k.cols / 8);
  check_launch("append_kernel");
}

void decode_attention(const DecodeAttentionParams& p, const LaunchContext& context) {
  const bool sizes = p.kv_heads > 0 && p.heads > 0 && p.heads % p.kv_heads == 0 && p.dim > 0 && p.dim % 8 == 0 && p.dim <= 256;
  if (!sizes || !in_eights(p.q) || !in_eights(p.o) || p.q.rows != p.at.tokens || p.q.cols != std::int64_t{p.heads} * p.dim || !on_16_bytes(p.cache.keys) ||
      !on_16_bytes(p.cache.values))
    refuse("decode_attention", {{"tokens", p.at.tokens}, {"heads", p.heads}, {"kv_heads", p.kv_heads}, {"dim", p.dim}},
           "whole groups of heads, widths in eights up to 256, bf16 rows on 16 bytes");
  if (p.at.tokens == 0) return;
  if (p.dim <= 64) launch<64>(p, context);
  else if (p.dim <= 128) launch<128>(p, context);
  else launch<256>(p, context);
}

} // namespace gdn::kernels
