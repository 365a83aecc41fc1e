// Front end, forward. One CTA per (chunk, head): a warp walks 16 tokens with a window of four rows in
// registers, a row's norm is a sum over the warp. One more CTA per chunk does the gates.
#include "kernels/common/check.h"
#include "kernels/gdn/pre_rows.cuh"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

__device__ void forward_gates(const GdnPreForwardParams& p, const GdnChunk& chunk) {
  const GdnPreInputs& in = p.in;
  const int hv = in.shape.value_heads;
  for (int i = threadIdx.x; i < chunk.rows * hv; i += kPreThreads) {
    const int head = i % hv;
    const std::int64_t token = chunk.first_token + i / hv, out = token * hv + head;
    if (chunk.kind == GdnChunk::kPadding) {
      p.g[out] = p.beta[out] = 0.0f;
      continue;
    }
    const float alpha = RowVector<4>::widen(in.alpha[token * in.alpha_stride + head].bits);
    const float logit = RowVector<4>::widen(in.beta_logits[token * in.beta_stride + head].bits);
    p.g[out] = -expf(in.a_log[head]) * softplus(alpha + in.dt_bias[head]);
    p.beta[out] = (in.double_beta ? 2.0f : 1.0f) * sigmoid(logit);
  }
}

template <int kValues>
__global__ void __launch_bounds__(kPreThreads)
gdn_pre_forward_kernel(const __grid_constant__ GdnPreForwardParams p, int units, bool vector) {
  const GdnPreInputs& in = p.in;
  const PreChunk at(in.table, blockIdx.x / units);
  const GdnChunk& chunk = at.chunk;
  if (chunk.kind == GdnChunk::kUnused) return;
  const PreUnit unit(in.shape, blockIdx.x % units);
  if (unit.kind == PreUnit::kGates) {
    forward_gates(p, chunk);
    return;
  }
  const int first = threadIdx.x / 32 * kPreRows, column = threadIdx.x % 32 * kValues;
  const int last = min(first + kPreRows, chunk.rows);
  const bool active = column < unit.width;
  Bf16* const base = unit.kind == PreUnit::kQuery ? p.q : unit.kind == PreUnit::kKey ? p.k : p.v;
  Bf16* const out = base + (static_cast<std::int64_t>(chunk.first_token) * unit.heads + unit.head) *
                               unit.width + column;
  const std::int64_t stride = static_cast<std::int64_t>(unit.heads) * unit.width;
  using Vector = RowVector<kValues>;
  if (chunk.kind == GdnChunk::kPadding) {
    for (int row = first; row < last && active; ++row) Vector::zero().store(out + row * stride, true);
    return;
  }
  const Bf16* const x = in.qkv + chunk.first_token * in.qkv_stride + unit.channel + column;
  const PreTaps<kValues> taps(in, unit.channel + column, active);
  const bool norm = in.normalise && unit.kind != PreUnit::kValue;
  auto load = [&](int row) {
    return active && (row >= 0 || !at.first) ? Vector::load(x + row * in.qkv_stride, vector)
                                             : Vector::zero();
  };
  if (first >= last) return;
  Vector w0 = load(first - 3), w1 = load(first - 2), w2 = load(first - 1);
  for (int row = first; row < last; ++row) {
    const Vector w3 = load(row);
    Vector y;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float pre = taps.bias[i] + taps.w[i][0] * w0.x[i] + taps.w[i][1] * w1.x[i] +
                        taps.w[i][2] * w2.x[i] + taps.w[i][3] * w3.x[i];
      y.x[i] = pre * sigmoid(pre);
      sum += y.x[i] * y.x[i];
    }
    if (norm) {
      const float rho = rsqrtf(lane_sum<32>(sum) + in.epsilon);
#pragma unroll
      for (int i = 0; i < kValues; ++i) y.x[i] *= rho;
    }
    if (active) y.store(out + row * stride, true);
    w0 = w1;
    w1 = w2;
    w2 = w3;
  }
}

} // namespace

void gdn_pre_forward(const GdnPreForwardParams& p, const LaunchContext& context) {
  const GdnShape& s = p.in.shape;
  check_front_end_shape(s, "gdn_pre_forward");
  const int units = 2 * s.key_heads + s.value_heads + 1;
  const auto ctas = static_cast<unsigned>(gdn_chunk_capacity(s.tokens, s.sequences) * units);
  const bool narrow = s.key_dim <= 128 && s.value_dim <= 128;
  const bool vector = vector_rows(p.in.qkv, p.in.qkv_stride, narrow ? 4 : 8);
  const auto kernel = narrow ? gdn_pre_forward_kernel<4> : gdn_pre_forward_kernel<8>;
  kernel<<<ctas, kPreThreads, 0, context.stream>>>(p, units, vector);
  check_launch("gdn_pre_forward_kernel");
}

} // namespace gdn::kernels
