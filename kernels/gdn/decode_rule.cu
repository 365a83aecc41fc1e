// The rule of a decode step: reading and writing the states is all the time there is (2 x 64 KiB a head
// at d = 128, for 0.1 MFLOP). A warp owns 16 value columns of one head and keeps them in registers from
// the first token to the last: lane = 8 groups of key rows x 4 parts of 4 columns. Both products with S
// are taken of the state before the update (S'^T q = e^g S^T q + (k . q) u), so S is walked once.
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"
#include "kernels/gdn/decode_batch.cuh"

namespace gdn::kernels {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kColumns = 16; // of a warp

// Sum over the row groups; lanes of one part get the same bits.
__device__ __forceinline__ float over_groups(float x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

__device__ __forceinline__ float element(const RawVector<4>& x, int i) {
  return __uint_as_float(i % 2 == 0 ? x.words[i / 2] << 16 : x.words[i / 2] & 0xffff0000u);
}

// kRows: rows of the state in a lane, key_dim <= 8 kRows.
template <int kRows>
__global__ void __launch_bounds__(kThreads, kRows <= 16 ? 3 : 2)
    gdn_decode_rule_kernel(const __grid_constant__ GdnDecodeRuleParams p, int slices) {
  const std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int slice = static_cast<int>(item % slices);
  const int head = static_cast<int>(item / slices % p.value_heads);
  const std::int64_t request = item / slices / p.value_heads;
  if (request >= p.batch.requests) return;
  const int lane = threadIdx.x % 32, first_row = lane / 4 * kRows;
  const int column = slice * kColumns + lane % 4 * 4;
  const bool inside = column < p.value_dim; // of the columns; rows are checked in fours
  const DecodeRequest at = decode_request(p.batch, request);
  const std::int64_t out_stride = std::int64_t{p.value_heads} * p.value_dim;
  Bf16* const out = p.o + std::int64_t{head} * p.value_dim + column;
  if (at.slot < 0) {
    for (std::int64_t t = at.first; t < at.end; ++t)
      if (inside && lane < 4) RowVector<4>::zero().store(out + t * out_stride, true);
    return;
  }
  if (at.first == at.end) return;

  const std::int64_t head_size = std::int64_t{p.key_dim} * p.value_dim;
  const std::int64_t in_head = std::int64_t{first_row} * p.value_dim + column;
  float* const state = p.state + (at.slot * p.value_heads + head) * head_size + in_head;
  float s[kRows][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool there = inside && first_row + i < p.key_dim;
    const float4 x = there ? *reinterpret_cast<const float4*>(state + std::int64_t{i} * p.value_dim)
                           : float4{0, 0, 0, 0};
    s[i][0] = x.x, s[i][1] = x.y, s[i][2] = x.z, s[i][3] = x.w;
  }
  auto write = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (inside && first_row + i < p.key_dim)
        *reinterpret_cast<float4*>(to + std::int64_t{i} * p.value_dim) = {s[i][0], s[i][1], s[i][2], s[i][3]};
  };

  const int key_head = head / (p.value_heads / p.key_heads);
  const Bf16* const q_row = p.q.data + key_head * p.q.head_stride + first_row;
  const Bf16* const k_row = p.k.data + key_head * p.k.head_stride + first_row;
  const Bf16* const v_row = p.v.data + head * p.v.head_stride + column;
  const bool made = p.g != nullptr; // the gates
  const float rate = made ? 0.0f : -expf(p.a_log[head]), dt_bias = made ? 0.0f : p.dt_bias[head];
  for (std::int64_t t = at.first; t < at.end; ++t) {
    RawVector<4> q[kRows / 4], k[kRows / 4]; // widened where used: registers are for the state
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const bool there = first_row + 4 * i < p.key_dim;
      q[i] = there ? RawVector<4>::load(q_row + t * p.q.token_stride + 4 * i, true) : RawVector<4>::zero();
      k[i] = there ? RawVector<4>::load(k_row + t * p.k.token_stride + 4 * i, true) : RawVector<4>::zero();
    }
    const auto v = inside ? RowVector<4>::load(v_row + t * p.v.token_stride, true) : RowVector<4>::zero();
    float g, beta;
    if (made) {
      g = p.g[t * p.value_heads + head];
      beta = p.beta[t * p.value_heads + head];
    } else {
      g = rate * softplus(RowVector<4>::widen(p.alpha[t * p.alpha_stride + head].bits) + dt_bias);
      beta = (p.double_beta ? 2.0f : 1.0f) * sigmoid(RowVector<4>::widen(p.beta_logits[t * p.beta_stride + head].bits));
    }
    const float decay = expf(g);

    float sk[4] = {0, 0, 0, 0}, sq[4] = {0, 0, 0, 0}, qq = 0, kk = 0, kq = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float q_i = element(q[i / 4], i % 4), k_i = element(k[i / 4], i % 4);
      qq += q_i * q_i, kk += k_i * k_i, kq += q_i * k_i;
#pragma unroll
      for (int j = 0; j < 4; ++j) sk[j] += s[i][j] * k_i, sq[j] += s[i][j] * q_i;
    }
    // The norms stay factors of sums: normalised rows never exist.
    const float k_rstd = p.l2_norm ? rsqrtf(over_groups(kk) + p.l2_epsilon) : 1.0f;
    const float q_rstd = p.l2_norm ? rsqrtf(over_groups(qq) + p.l2_epsilon) : 1.0f;
    const float along = k_rstd * over_groups(kq);
    float u[4];
    RowVector<4> o;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float u_j = beta * (v.x[j] - decay * k_rstd * over_groups(sk[j]));
      o.x[j] = p.scale * q_rstd * (decay * over_groups(sq[j]) + along * u_j);
      u[j] = k_rstd * u_j;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] = decay * s[i][j] + element(k[i / 4], i % 4) * u[j];
    if (inside && lane < 4) o.store(out + t * out_stride, true);
    if (p.token_state != nullptr) write(p.token_state + (t * p.value_heads + head) * head_size + in_head);
  }
  write(state);
}

bool aligned(const void* p, std::uintptr_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }
bool in_fours(const GdnTokens& t) {
  return aligned(t.data, 8) && t.token_stride % 4 == 0 && t.head_stride % 4 == 0;
}

} // namespace

void gdn_decode_rule(const GdnDecodeRuleParams& p, const LaunchContext& context) {
  const bool sizes = p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0 && p.key_dim > 0 &&
                     p.key_dim % 8 == 0 && p.key_dim <= 256 && p.value_dim > 0 && p.value_dim % 8 == 0;
  const bool batch = p.batch.requests >= 0 && (p.batch.cu_tokens != nullptr || p.batch.tokens == p.batch.requests);
  if (!sizes || !batch || !in_fours(p.q) || !in_fours(p.k) || !in_fours(p.v) || !aligned(p.o, 8) ||
      !aligned(p.state, 16) || !aligned(p.token_state, 16) || (p.g == nullptr) != (p.beta == nullptr))
    refuse("gdn_decode_rule",
           {{"key_heads", p.key_heads}, {"value_heads", p.value_heads}, {"key_dim", p.key_dim},
            {"value_dim", p.value_dim}, {"requests", p.batch.requests}, {"tokens", p.batch.tokens}},
           "whole groups of value heads, widths in eights, keys to 256, one token a request without offsets, "
           "strides in fours, rows on 8 and states on 16 bytes, both gates or none");
  const int slices = (p.value_dim + kColumns - 1) / kColumns;
  const std::int64_t items = p.batch.requests * p.value_heads * slices;
  if (items == 0) return;
  const auto ctas = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  const auto kernel = p.key_dim <= 64    ? gdn_decode_rule_kernel<8>
                      : p.key_dim <= 96  ? gdn_decode_rule_kernel<12>
                      : p.key_dim <= 128 ? gdn_decode_rule_kernel<16>
                      : p.key_dim <= 192 ? gdn_decode_rule_kernel<24>
                                         : gdn_decode_rule_kernel<32>;
  kernel<<<ctas, kThreads, 0, context.stream>>>(p, slices);
  check_launch("gdn_decode_rule_kernel");
}

} // namespace gdn::kernels
