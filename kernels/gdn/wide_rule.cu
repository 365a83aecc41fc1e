// The rule token by token in fp32, for widths the tensor-core kernels do not take: any key width up
// to 256, any value width. One CTA owns 32 value columns of one (sequence, value head): eight warps
// hold 32 key rows each, a lane one column. Slower by far; needs no wgmma and rounds only what it
// stores.
//
// The backward rebuilds states from a checkpoint every 16 tokens, and sums over value columns and
// over the value heads of a key head in a second kernel, in fixed order.
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = kMaxWideKeyDim / kWarps; // key rows of a warp
static_assert(kRows == 32);
constexpr int kBlock = kWideBlock; // tokens between checkpoints

struct Shared {
  float q[kBlock][kMaxWideKeyDim], k[kBlock][kMaxWideKeyDim]; // normalised, zero past the key width
  float v[kBlock][32], d_o[kBlock][32], z[kBlock][32];
  float decay[kBlock], beta[kBlock];
  float sums[2][kWarps][32];
};

// Where a CTA works, and one thread's column.
struct Place {
  int sequence, head, key_head, slice, column;
  bool active; // the column exists
  std::int64_t first_token, length, first_chunk;
  __device__ Place(const RuleArgs& a) {
    const int slices = a.wide_slices;
    slice = static_cast<int>(blockIdx.x % slices);
    head = static_cast<int>(blockIdx.x / slices % a.value_heads);
    sequence = a.order[blockIdx.x / slices / a.value_heads];
    key_head = head / a.group;
    column = slice * 32 + threadIdx.x % 32;
    active = column < a.value_dim;
    first_chunk = a.offsets[sequence];
    const std::int64_t chunks = a.offsets[sequence + 1] - first_chunk;
    first_token = chunks > 0 ? a.chunks[first_chunk].first_token : 0;
    length = chunks > 0 ? (chunks - 1) * kChunk + a.chunks[first_chunk + chunks - 1].rows : 0;
  }
};

__device__ float element(const GdnTokens& t, std::int64_t token, int head, int column) {
  return RowVector<4>::widen(t.data[token * t.token_stride + head * t.head_stride + column].bits);
}

// Tokens begin .. begin + count of the sequence into shared memory.
__device__ void load_block(const RuleArgs& a, Shared& s, const Place& at, std::int64_t begin,
                           int count, bool backward) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  for (int t = warp; t < count; t += kWarps) {
    const std::int64_t token = at.first_token + begin + t;
    float q[kRows / 4], k[kRows / 4], q_sum = 0.0f, k_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxWideKeyDim / 32; ++i) {
      const int row = 32 * i + lane;
      q[i] = row < a.key_dim ? element(a.wide_q, token, at.key_head, row) : 0.0f;
      k[i] = row < a.key_dim ? element(a.wide_k, token, at.key_head, row) : 0.0f;
      q_sum += q[i] * q[i];
      k_sum += k[i] * k[i];
    }
    const float q_norm = a.l2_norm ? rsqrtf(lane_sum<32>(q_sum) + a.l2_epsilon) : 1.0f;
    const float k_norm = a.l2_norm ? rsqrtf(lane_sum<32>(k_sum) + a.l2_epsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < kMaxWideKeyDim / 32; ++i) {
      s.q[t][32 * i + lane] = q[i] * q_norm;
      s.k[t][32 * i + lane] = k[i] * k_norm;
    }
    const std::int64_t gate = token * a.value_heads + at.head;
    s.v[t][lane] = at.active && !backward ? element(a.wide_v, token, at.head, at.column) : 0.0f;
    if (backward) {
      s.d_o[t][lane] = at.active ? element(a.wide_d_o, token, at.head, at.column) : 0.0f;
      s.z[t][lane] = at.active ? a.wide_z[gate * a.value_dim + at.column] : 0.0f;
    }
    if (lane == 0) {
      float g;
      if (a.gamma != nullptr) // saved prefix sums restart in every chunk
        g = a.gamma[gate] - ((begin + t) % kChunk == 0 ? 0.0f : a.gamma[gate - a.value_heads]);
      else
        g = a.g[gate];
      s.decay[t] = expf(g);
      s.beta[t] = a.beta[gate];
      if (a.q_rstd != nullptr) a.q_rstd[token * a.key_heads + at.key_head] = q_norm;
      if (a.k_rstd != nullptr) a.k_rstd[token * a.key_heads + at.key_head] = k_norm;
    }
  }
  __syncthreads();
}

// Sum over the warps of each column's `x`, for all threads.
__device__ float over_rows(Shared& s, int buffer, float x) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  s.sums[buffer][warp][lane] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s.sums[buffer][w][lane];
  return sum;
}

template <class Function>
__device__ void each_state_element(const RuleArgs& a, const Place& at, Function function) {
  const int first_row = threadIdx.x / 32 * kRows;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (first_row + i < a.key_dim && at.active)
      function(i, static_cast<std::int64_t>(first_row + i) * a.value_dim + at.column);
}

__device__ std::int64_t checkpoint_at(const RuleArgs& a, const Place& at, std::int64_t begin) {
  const std::int64_t slot = at.first_chunk * (kChunk / kBlock) + begin / kBlock;
  return (slot * a.value_heads + at.head) * a.key_dim * a.value_dim;
}

// kRebuild: writes checkpoints and Z instead of the output.
template <bool kRebuild>
__global__ void __launch_bounds__(kThreads)
    gdn_wide_forward_kernel(const __grid_constant__ RuleArgs a) {
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const Place at(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const std::int64_t entry = a.state_slots == nullptr ? at.sequence : a.state_slots[at.sequence];
  const std::int64_t state_at = (entry * a.value_heads + at.head) * a.key_dim * a.value_dim;
  float state[kRows] = {};
  if (a.state_in != nullptr)
    each_state_element(a, at, [&](int i, std::int64_t e) { state[i] = a.state_in[state_at + e]; });
  for (std::int64_t begin = 0; begin < at.length; begin += kBlock) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kBlock), at.length - begin));
    load_block(a, s, at, begin, count, false);
    if constexpr (kRebuild) {
      float* checkpoint = a.wide_checkpoints + checkpoint_at(a, at, begin);
      each_state_element(a, at, [&](int i, std::int64_t e) { checkpoint[e] = state[i]; });
    }
    for (int t = 0; t < count; ++t) {
      float along = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        state[i] *= s.decay[t];
        along += s.k[t][first_row + i] * state[i];
      }
      const float z = s.v[t][lane] - over_rows(s, 0, along), u = s.beta[t] * z;
      float read = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        state[i] += s.k[t][first_row + i] * u;
        read += s.q[t][first_row + i] * state[i];
      }
      const float o = a.scale * over_rows(s, 1, read);
      const std::int64_t out =
          ((at.first_token + begin + t) * a.value_heads + at.head) * a.value_dim + at.column;
      if (warp != 0 || !at.active) continue;
      if constexpr (kRebuild)
        a.wide_z[out] = z;
      else
        a.o[out].bits = RowVector<4>::narrow(o);
    }
  }
  if (!kRebuild && a.state_out != nullptr)
    each_state_element(a, at, [&](int i, std::int64_t e) { a.state_out[state_at + e] = state[i]; });
}

// One step of over_columns: lanes with bit kCount keep the upper half of x[0 .. 2 kCount).
template <int kCount>
__device__ __forceinline__ void halve(float (&x)[kRows]) {
  const bool upper = threadIdx.x & kCount;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float low = x[i], high = x[i + kCount];
    x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kCount);
  }
}

// Row sums over the lanes of a warp: lane i returns the sum of x[i].
__device__ __forceinline__ float over_columns(float (&x)[kRows]) {
  halve<16>(x);
  halve<8>(x);
  halve<4>(x);
  halve<2>(x);
  halve<1>(x);
  return x[0];
}

__global__ void __launch_bounds__(kThreads)
    gdn_wide_backward_kernel(const __grid_constant__ RuleArgs a) {
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const Place at(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const std::int64_t state_at =
      (static_cast<std::int64_t>(at.sequence) * a.value_heads + at.head) * a.key_dim * a.value_dim;
  float d_state[kRows] = {};
  if (a.state_in != nullptr)
    each_state_element(a, at,
                       [&](int i, std::int64_t e) { d_state[i] = a.state_in[state_at + e]; });
  for (std::int64_t begin = (at.length - 1) / kBlock * kBlock; begin >= 0 && at.length > 0;
       begin -= kBlock) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kBlock), at.length - begin));
    load_block(a, s, at, begin, count, true);
    const float* checkpoint = a.wide_checkpoints + checkpoint_at(a, at, begin);
    for (int t = count - 1; t >= 0; --t) {
      float before[kRows] = {}; // the decayed state, before the write of token t
      each_state_element(a, at, [&](int i, std::int64_t e) { before[i] = checkpoint[e]; });
      for (int earlier = 0; earlier < t; ++earlier) {
        const float u = s.beta[earlier] * s.z[earlier][lane];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          before[i] = s.decay[earlier] * before[i] + s.k[earlier][first_row + i] * u;
      }
      const float u = s.beta[t] * s.z[t][lane], d_o = s.d_o[t][lane];
      float dq[kRows], along = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float k = s.k[t][first_row + i];
        before[i] *= s.decay[t];
        dq[i] = a.scale * (before[i] + k * u) * d_o;
        d_state[i] += a.scale * s.q[t][first_row + i] * d_o;
        along += d_state[i] * k;
      }
      const float du = over_rows(s, 0, along), dw = -s.beta[t] * du;
      float dk[kRows], dg = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        dk[i] = d_state[i] * u + before[i] * dw;
        d_state[i] += s.k[t][first_row + i] * dw;
        dg += d_state[i] * before[i];
        d_state[i] *= s.decay[t];
      }
      const std::int64_t row = (at.first_token + begin + t) * a.value_heads + at.head;
      float* part = a.wide_parts + (row * a.wide_slices + at.slice) * (2 * kMaxWideKeyDim + 2);
      part[first_row + lane] = over_columns(dq);
      part[kMaxWideKeyDim + first_row + lane] = over_columns(dk);
      dg = lane_sum<32>(over_rows(s, 1, dg));
      const float d_beta = lane_sum<32>(du * s.z[t][lane]);
      if (warp != 0) continue;
      if (lane == 0) {
        part[2 * kMaxWideKeyDim] = dg;
        part[2 * kMaxWideKeyDim + 1] = d_beta;
      }
      if (at.active) a.dv[row * a.value_dim + at.column].bits = RowVector<4>::narrow(-dw);
    }
  }
  if (a.state_out != nullptr)
    each_state_element(a, at,
                       [&](int i, std::int64_t e) { a.state_out[state_at + e] = d_state[i]; });
}

// Tokens before the padding: where the padding pieces of the chunk table start.
__device__ std::int64_t used_tokens(const RuleArgs& a) {
  const std::int64_t first = a.offsets[a.sequences], last = a.offsets[a.sequences + 1];
  return first < last ? a.chunks[first].first_token : a.tokens;
}

// One warp per (token, key head): sums over slices and value heads, the norm's gradient.
__global__ void __launch_bounds__(kThreads)
    gdn_wide_sums_kernel(const __grid_constant__ RuleArgs a) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kWarps) + threadIdx.x / 32;
  const std::int64_t token = row / a.key_heads;
  const int key_head = static_cast<int>(row % a.key_heads);
  if (token >= a.tokens || token >= used_tokens(a)) return;
  constexpr int kPart = 2 * kMaxWideKeyDim + 2, kPer = kMaxWideKeyDim / 32;
  float d[2][kPer] = {};
  for (int h = 0; h < a.group; ++h) {
    const std::int64_t gate = token * a.value_heads + key_head * a.group + h;
    float dg = 0.0f, d_beta = 0.0f;
    for (int slice = 0; slice < a.wide_slices; ++slice) {
      const float* part = a.wide_parts + (gate * a.wide_slices + slice) * kPart;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        d[0][i] += part[32 * i + lane];
        d[1][i] += part[kMaxWideKeyDim + 32 * i + lane];
      }
      dg += part[2 * kMaxWideKeyDim];
      d_beta += part[2 * kMaxWideKeyDim + 1];
    }
    if (lane == 0) {
      a.dg[gate] = dg;
      a.dbeta[gate] = d_beta;
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float x[kPer], size = 0.0f, along = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int column = 32 * i + lane;
      x[i] = column < a.key_dim ? element(which == 0 ? a.wide_q : a.wide_k, token, key_head, column)
                                : 0.0f;
      size += x[i] * x[i];
      along += x[i] * d[which][i];
    }
    const float rho = a.l2_norm ? rsqrtf(lane_sum<32>(size) + a.l2_epsilon) : 1.0f;
    const float back = a.l2_norm ? lane_sum<32>(along) * rho * rho : 0.0f;
    Bf16* out = (which == 0 ? a.dq : a.dk) + row * a.key_dim;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (32 * i + lane < a.key_dim)
        out[32 * i + lane].bits = RowVector<4>::narrow(rho * (d[which][i] - back * x[i]));
  }
}

// Prefix sums of g inside each chunk: the one intermediate both paths save.
__global__ void gdn_wide_gamma_kernel(const __grid_constant__ RuleArgs a) {
  const std::int64_t index = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (index >= a.capacity * a.value_heads) return;
  const GdnChunk chunk = a.chunks[index / a.value_heads];
  if (chunk.kind != GdnChunk::kTokens) return;
  const std::int64_t at =
      static_cast<std::int64_t>(chunk.first_token) * a.value_heads + index % a.value_heads;
  float sum = 0.0f;
  for (int row = 0; row < chunk.rows; ++row)
    a.gamma_out[at + row * a.value_heads] = sum += a.g[at + row * a.value_heads];
}

unsigned scan_ctas(const RuleArgs& a) {
  return static_cast<unsigned>(a.sequences * a.value_heads * a.wide_slices);
}

template <class Kernel>
void launch_scan(Kernel kernel, const RuleArgs& args, const LaunchContext& context) {
  if (args.sequences == 0) return;
  GDN_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<scan_ctas(args), kThreads, sizeof(Shared), context.stream>>>(args);
  check_launch("gdn_wide kernel");
}

} // namespace

void launch_wide_forward(const RuleArgs& args, const LaunchContext& context) {
  const auto zero = [&](void* data, std::int64_t bytes) { // rows behind the sequences stay zero
    if (data != nullptr)
      GDN_CUDA(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), context.stream));
  };
  zero(args.o, args.tokens * args.value_heads * args.value_dim * 2);
  zero(args.n_out, args.tokens * args.value_heads * kChunk * 2);
  zero(args.gamma_out, args.tokens * args.value_heads * 4);
  zero(args.q_rstd, args.tokens * args.key_heads * 4);
  zero(args.k_rstd, args.tokens * args.key_heads * 4);
  if (args.gamma_out != nullptr) {
    const std::int64_t rows = args.capacity * args.value_heads;
    gdn_wide_gamma_kernel<<<static_cast<unsigned>((rows + 127) / 128), 128, 0, context.stream>>>(
        args);
    check_launch("gdn_wide_gamma_kernel");
  }
  launch_scan(gdn_wide_forward_kernel<false>, args, context);
}

void launch_wide_backward(const RuleArgs& args, const float* initial, const float* d_final,
                          float* d_initial, const LaunchContext& context) {
  const auto zero = [&](void* data, std::int64_t bytes) {
    GDN_CUDA(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), context.stream));
  };
  zero(args.dq, args.tokens * args.key_heads * args.key_dim * 2);
  zero(args.dk, args.tokens * args.key_heads * args.key_dim * 2);
  zero(args.dv, args.tokens * args.value_heads * args.value_dim * 2);
  zero(args.dg, args.tokens * args.value_heads * 4);
  zero(args.dbeta, args.tokens * args.value_heads * 4);
  RuleArgs a = args;
  a.state_in = initial;
  launch_scan(gdn_wide_forward_kernel<true>, a, context);
  a.state_in = d_final;
  a.state_out = d_initial;
  launch_scan(gdn_wide_backward_kernel, a, context);
  const std::int64_t rows = args.tokens * args.key_heads;
  if (rows == 0) return;
  gdn_wide_sums_kernel<<<static_cast<unsigned>((rows + kWarps - 1) / kWarps), kThreads, 0,
                         context.stream>>>(a);
  check_launch("gdn_wide_sums_kernel");
}

} // namespace gdn::kernels
