// Reading the cache is all the time there is. A cluster of eight CTAs owns a token and up to eight query heads of one kv
// head, and divides its keys into 32 runs, one a warp. A lane holds eight columns, so a warp reads one to four keys at a
// time, four times over before it needs them; running maxima, sums and outputs stay in registers and meet at the end:
// lanes by shuffles, warps and CTAs through shared memory.
#include <cooperative_groups.h>

#include "kernels/attention/decode_attention.h"
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"

namespace gdn::kernels {
namespace {

constexpr int kSplits = 8; // CTAs of a cluster
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kAhead = 4; // keys of a lane in flight
constexpr float kNone = -1e30f; // the maximum of no keys: finite, so that differences are

// A share of the keys: maxima and sums of exponentials (to the base 2), and outputs not yet divided by the sums.
template <int kHeads, int kColumns>
struct Partial {
  float most[kHeads], sum[kHeads], o[kHeads][kColumns];
};

// kLanes: of a key, 8 kLanes >= dim. kHeads: query heads of a cluster.
template <int kLanes, int kHeads>
__global__ void __cluster_dims__(kSplits, 1, 1) __launch_bounds__(kThreads, 2)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p, float scale) {
  constexpr int kKeys = 32 / kLanes, kColumns = 8 * kLanes; // kKeys: of a warp at a time
  using Vector = RowVector<8>;
  using Share = Partial<kHeads, kColumns>;
  __shared__ Share of_warp[kWarps], of_cta;
  const auto cluster = cooperative_groups::this_cluster();
  const int group = p.heads / p.kv_heads, parts = (group + kHeads - 1) / kHeads;
  const std::int64_t item = blockIdx.x / kSplits;
  const int first_head = static_cast<int>(item % parts) * kHeads;         // of the group
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
  const int key = lane / kLanes, column = lane % kLanes * 8;
  const bool inside = column < p.dim;
  const std::int64_t stride = std::int64_t{p.kv_heads} * p.dim;
  const std::int64_t origin = slot * p.cache.capacity * stride + std::int64_t{kv_head} * p.dim + column;

  float q[kHeads][8], o[kHeads][8] = {}, most[kHeads], sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Bf16* const row = static_cast<const Bf16*>(p.q.data) + token * p.q.stride + std::int64_t{head + h} * p.dim + column;
    const Vector x = inside && h < heads ? Vector::load(row, true) : Vector::zero();
#pragma unroll
    for (int i = 0; i < 8; ++i) q[h][i] = x.x[i] * scale;
    most[h] = kNone;
    sum[h] = 0.0f;
  }

  for (std::int64_t first = begin; first < end; first += kAhead * kKeys) {
    RawVector<8> k[kAhead], v[kAhead];
    bool there[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const std::int64_t at = first + j * kKeys + key;
      there[j] = at < end;
      const bool reads = there[j] && inside;
      k[j] = reads ? RawVector<8>::load(p.cache.keys + origin + at * stride, true) : RawVector<8>::zero();
      v[j] = reads ? RawVector<8>::load(p.cache.values + origin + at * stride, true) : RawVector<8>::zero();
    }
    float score[kAhead][kHeads];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const Vector row(k[j]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float x = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) x += q[h][i] * row.x[i];
        score[j][h] = lane_sum<kLanes>(x);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float highest = most[h];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (there[j]) highest = fmaxf(highest, score[j][h]);
      const float shrink = exp2f(most[h] - highest);
      most[h] = highest;
      sum[h] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; ++i) o[h][i] *= shrink;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        score[j][h] = there[j] ? exp2f(score[j][h] - highest) : 0.0f;
        sum[h] += score[j][h];
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const Vector row(v[j]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < 8; ++i) o[h][i] += score[j][h] * row.x[i];
    }
  }

  // The keys of a warp, then the warps of a CTA, then the CTAs.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float highest = most[h];
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, mask));
    const float shrink = exp2f(most[h] - highest);
    auto over_keys = [&](float x) {
      x *= shrink;
#pragma unroll
      for (int mask = kLanes; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
      return x;
    };
    const float total = over_keys(sum[h]);
    if (lane == 0) {
      of_warp[warp].most[h] = highest;
      of_warp[warp].sum[h] = total;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = over_keys(o[h][i]);
      if (key == 0) of_warp[warp].o[h][column + i] = x;
    }
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
  for (int i = threadIdx.x; i < kHeads * kColumns; i += kThreads) {
    const int h = i / kColumns, c = i % kColumns;
    float highest, total, x;
    merge([&](int w) -> const Share& { return of_warp[w]; }, kWarps, h, c, highest, total, x);
    of_cta.o[h][c] = x;
    if (c == 0) {
      of_cta.most[h] = highest;
      of_cta.sum[h] = total;
    }
  }
  cluster.sync();
  for (int i = split * kThreads + threadIdx.x; i < heads * kColumns; i += kSplits * kThreads) {
    const int h = i / kColumns, c = i % kColumns;
    float highest, total, x;
    merge([&](int s) -> const Share& { return *cluster.map_shared_rank(&of_cta, s); }, kSplits, h, c, highest, total, x);
    if (c < p.dim) out[h * p.dim + c].bits = Vector::narrow(x / total);
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

template <int kLanes>
void launch(const DecodeAttentionParams& p, const LaunchContext& context) {
  const int group = p.heads / p.kv_heads, at_once = group <= 1 ? 1 : group <= 2 ? 2 : group <= 4 ? 4 : 8;
  const auto ctas = static_cast<unsigned>(kSplits * p.at.tokens * p.kv_heads * ((group + at_once - 1) / at_once));
  const float scale = 1.44269504f / sqrtf(static_cast<float>(p.dim)); // exponentials to the base 2
  const auto kernel = at_once == 1   ? decode_attention_kernel<kLanes, 1>
                      : at_once == 2 ? decode_attention_kernel<kLanes, 2>
                      : at_once == 4 ? decode_attention_kernel<kLanes, 4>
                                     : decode_attention_kernel<kLanes, 8>;
  kernel<<<ctas, kThreads, 0, context.stream>>>(p, scale);
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
  if (p.dim <= 64) launch<8>(p, context);
  else if (p.dim <= 128) launch<16>(p, context);
  else launch<32>(p, context);
}

} // namespace gdn::kernels
