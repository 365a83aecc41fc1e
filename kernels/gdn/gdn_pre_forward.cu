// Front end, forward. A warp walks the rows of one (chunk, head) with a window of four rows in
// registers and a block of rows in flight; a row's norm is a sum over the warp. The gates are one
// more head.
#include "kernels/common/check.h"
#include "kernels/gdn/pre_rows.cuh"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

__device__ void forward_gates(const GdnPreForwardParams& p, const GdnChunk& chunk, int lane) {
  const GdnPreInputs& in = p.in;
  const int hv = in.shape.value_heads;
  for (int i = lane; i < chunk.rows * hv; i += 32) {
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
    gdn_pre_forward_kernel(const __grid_constant__ GdnPreForwardParams p, int units,
                           std::int64_t capacity, bool vector) {
  const GdnPreInputs& in = p.in;
  const int lane = threadIdx.x % 32;
  const std::int64_t index = blockIdx.x / units * kPreWarps + threadIdx.x / 32;
  if (index >= capacity) return;
  const PreChunk at(in.table, index);
  const GdnChunk& chunk = at.chunk;
  if (chunk.kind == GdnChunk::kUnused) return;
  const PreUnit unit(in.shape, blockIdx.x % units);
  if (unit.kind == PreUnit::kGates) {
    forward_gates(p, chunk, lane);
    return;
  }
  const int column = lane * kValues;
  const bool active = column < unit.width;
  Bf16* const base = unit.kind == PreUnit::kQuery ? p.q : unit.kind == PreUnit::kKey ? p.k : p.v;
  Bf16* const out =
      base + (static_cast<std::int64_t>(chunk.first_token) * unit.heads + unit.head) * unit.width +
      column;
  const std::int64_t stride = static_cast<std::int64_t>(unit.heads) * unit.width;
  using Raw = RawVector<kValues>;
  using Vector = RowVector<kValues>;
  if (chunk.kind == GdnChunk::kPadding) {
    for (int row = 0; row < chunk.rows && active; ++row)
      Vector::zero().store(out + row * stride, true);
    return;
  }
  const Bf16* const x = in.qkv + chunk.first_token * in.qkv_stride + unit.channel + column;
  const PreTaps<kValues> taps(in, unit.channel + column, active);
  const bool norm = in.normalise && unit.kind != PreUnit::kValue;
  auto load = [&](int row) {
    return active && row < chunk.rows && (row >= 0 || !at.first)
               ? Raw::load(x + row * in.qkv_stride, vector)
               : Raw::zero();
  };
  Vector w0(load(-3)), w1(load(-2)), w2(load(-1));
  Raw next[kPreBlock];
#pragma unroll
  for (int i = 0; i < kPreBlock; ++i) next[i] = load(i);
  for (int first = 0; first < chunk.rows; first += kPreBlock) {
    Raw rows[kPreBlock];
#pragma unroll
    for (int i = 0; i < kPreBlock; ++i) {
      rows[i] = next[i];
      next[i] = load(first + kPreBlock + i);
    }
#pragma unroll
    for (int r = 0; r < kPreBlock; ++r) {
      const Vector w3(rows[r]);
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
      if (active && first + r < chunk.rows) y.store(out + (first + r) * stride, true);
      w0 = w1;
      w1 = w2;
      w2 = w3;
    }
  }
}

} // namespace

void gdn_pre_forward(const GdnPreForwardParams& p, const LaunchContext& context) {
  const GdnShape& s = p.in.shape;
  check_front_end_shape(s, "gdn_pre_forward");
  const int units = 2 * s.key_heads + s.value_heads + 1;
  const std::int64_t capacity = gdn_chunk_capacity(s.tokens, s.sequences);
  const auto ctas = static_cast<unsigned>((capacity + kPreWarps - 1) / kPreWarps * units);
  const bool narrow = s.key_dim <= 128 && s.value_dim <= 128;
  const bool vector = vector_rows(p.in.qkv, p.in.qkv_stride, narrow ? 4 : 8);
  const auto kernel = narrow ? gdn_pre_forward_kernel<4> : gdn_pre_forward_kernel<8>;
  kernel<<<ctas, kPreThreads, 0, context.stream>>>(p, units, capacity, vector);
  check_launch("gdn_pre_forward_kernel");
}

} // namespace gdn::kernels
