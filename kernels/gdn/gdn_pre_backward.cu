// Front end, backward. One CTA per (8 chunks, head), a warp per chunk in turn: it walks the chunk's
// rows and the three behind them with a block of rows in flight. Pre-activation, SiLU and norm
// again from the projection, their gradient, and the gradient of the row three back once its four
// contributions are known. Tap sums stay in registers over a warp's chunks.
#include "kernels/common/check.h"
#include "kernels/gdn/pre_rows.cuh"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

constexpr int kSums = 5; // four taps and the bias, per channel

struct Scratch {
  float* taps;                            // [parts, channels, kSums]
  float* gates;                           // [parts, value_heads, 2]
  std::int64_t parts, channels, capacity; // capacity: rows of the chunk table
};

// A warp per value head: 32 tokens a step.
__device__ void backward_gates(const GdnPreBackwardParams& p, std::int64_t part,
                               const Scratch& scratch) {
  const GdnPreInputs& in = p.in;
  const int hv = in.shape.value_heads, lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < hv; head += kPreWarps) {
    const float rate = expf(in.a_log[head]), bias = in.dt_bias[head];
    float sum_a = 0.0f, sum_bias = 0.0f;
    for (int c = 0; c < kPreChunksPerPart; ++c) {
      const std::int64_t index = part * kPreChunksPerPart + c;
      if (index >= scratch.capacity) break;
      const GdnChunk chunk = in.table.chunks[index];
      if (chunk.kind == GdnChunk::kUnused) continue;
      for (int row = lane; row < chunk.rows; row += 32) {
        const std::int64_t token = chunk.first_token + row, at = token * hv + head;
        float d_alpha = 0.0f, d_logit = 0.0f;
        if (chunk.kind == GdnChunk::kTokens) {
          const float x = RowVector<4>::widen(in.alpha[token * in.alpha_stride + head].bits) + bias;
          const float logit =
              RowVector<4>::widen(in.beta_logits[token * in.beta_stride + head].bits);
          d_alpha = -rate * sigmoid(x) * p.dg[at];
          d_logit = (in.double_beta ? 2.0f : 1.0f) * p.dbeta[at] * sigmoid(logit) * sigmoid(-logit);
          sum_a += -rate * softplus(x) * p.dg[at];
          sum_bias += d_alpha;
        }
        p.d_alpha[token * p.d_alpha_stride + head].bits = RowVector<4>::narrow(d_alpha);
        p.d_beta_logits[token * p.d_beta_stride + head].bits = RowVector<4>::narrow(d_logit);
      }
    }
    sum_a = lane_sum<32>(sum_a);
    sum_bias = lane_sum<32>(sum_bias);
    if (lane == 0) {
      scratch.gates[(part * hv + head) * 2] = sum_a;
      scratch.gates[(part * hv + head) * 2 + 1] = sum_bias;
    }
  }
}

template <int kValues>
__global__ void __launch_bounds__(kPreThreads, kValues == 4 ? 4 : 1)
    gdn_pre_backward_kernel(const __grid_constant__ GdnPreBackwardParams p, int units,
                            Scratch scratch, bool vector, bool out_vector) {
  __shared__ float sums[kPreWarps][32 * kValues * kSums];
  const GdnPreInputs& in = p.in;
  const std::int64_t part = blockIdx.x / units;
  const PreUnit unit(in.shape, blockIdx.x % units);
  if (unit.kind == PreUnit::kGates) {
    backward_gates(p, part, scratch);
    return;
  }
  using Raw = RawVector<kValues>;
  using Vector = RowVector<kValues>;
  const int column = threadIdx.x % 32 * kValues;
  const bool active = column < unit.width;
  const bool norm = in.normalise && unit.kind != PreUnit::kValue;
  const PreTaps<kValues> taps(in, unit.channel + column, active);
  const Bf16* const d_base = unit.kind == PreUnit::kQuery ? p.dq
                             : unit.kind == PreUnit::kKey ? p.dk
                                                          : p.dv;
  const std::int64_t d_stride = static_cast<std::int64_t>(unit.heads) * unit.width;
  float d_taps[kValues][4] = {}, d_bias[kValues] = {};

  for (int c = threadIdx.x / 32; c < kPreChunksPerPart; c += kPreWarps) {
    const std::int64_t index = part * kPreChunksPerPart + c;
    if (index >= scratch.capacity) break;
    const PreChunk at(in.table, index);
    const GdnChunk& chunk = at.chunk;
    if (chunk.kind == GdnChunk::kUnused) break;
    Bf16* out = p.d_qkv + chunk.first_token * p.d_qkv_stride + unit.channel + column;
    if (chunk.kind == GdnChunk::kPadding) {
      for (int row = 0; row < chunk.rows && active; ++row)
        Vector::zero().store(out + row * p.d_qkv_stride, out_vector);
      continue;
    }
    const Bf16* const x = in.qkv + chunk.first_token * in.qkv_stride + unit.channel + column;
    const Bf16* const dy =
        d_base +
        (static_cast<std::int64_t>(chunk.first_token) * unit.heads + unit.head) * unit.width +
        column;
    const int limit = min(at.limit, chunk.rows + 3);
    auto load_x = [&](int row) {
      return active && row < limit && (row >= 0 || !at.first)
                 ? Raw::load(x + row * in.qkv_stride, vector)
                 : Raw::zero();
    };
    auto load_dy = [&](int row) {
      return active && row < limit ? Raw::load(dy + row * d_stride, true) : Raw::zero();
    };
    Vector w0(load_x(-3)), w1(load_x(-2)), w2(load_x(-1));
    Vector d0 = Vector::zero(), d1 = d0,
           d2 = d0; // gradients of the pre-activation, three rows back
    Raw next_x[kPreBlock], next_dy[kPreBlock];
#pragma unroll
    for (int i = 0; i < kPreBlock; ++i) {
      next_x[i] = load_x(i);
      next_dy[i] = load_dy(i);
    }
    for (int first = 0; first < chunk.rows + 3; first += kPreBlock) {
      Raw rows_x[kPreBlock], rows_dy[kPreBlock];
#pragma unroll
      for (int i = 0; i < kPreBlock; ++i) {
        rows_x[i] = next_x[i];
        rows_dy[i] = next_dy[i];
        next_x[i] = load_x(first + kPreBlock + i);
        next_dy[i] = load_dy(first + kPreBlock + i);
      }
#pragma unroll
      for (int r = 0; r < kPreBlock; ++r) {
        const int row = first + r;
        const Vector w3(rows_x[r]);
        Vector d3(rows_dy[r]); // zero past the sequence's end, and with it all that follows
        Vector y, slope;
        float sum = 0.0f, along = 0.0f;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const float pre = taps.bias[i] + taps.w[i][0] * w0.x[i] + taps.w[i][1] * w1.x[i] +
                            taps.w[i][2] * w2.x[i] + taps.w[i][3] * w3.x[i];
          const float s = sigmoid(pre);
          y.x[i] = pre * s;
          slope.x[i] = s + y.x[i] * (1.0f - s);
          sum += y.x[i] * y.x[i];
          along += y.x[i] * d3.x[i];
        }
        if (norm) {
          const float rho = rsqrtf(lane_sum<32>(sum) + in.epsilon);
          const float back = lane_sum<32>(along) * rho * rho;
#pragma unroll
          for (int i = 0; i < kValues; ++i) d3.x[i] = rho * (d3.x[i] - back * y.x[i]);
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) d3.x[i] *= slope.x[i];
        if (row < chunk.rows) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            d_taps[i][0] += d3.x[i] * w0.x[i];
            d_taps[i][1] += d3.x[i] * w1.x[i];
            d_taps[i][2] += d3.x[i] * w2.x[i];
            d_taps[i][3] += d3.x[i] * w3.x[i];
            d_bias[i] += d3.x[i];
          }
        }
        if (row >= 3 && row < chunk.rows + 3 && active) {
          Vector dx;
#pragma unroll
          for (int i = 0; i < kValues; ++i)
            dx.x[i] = taps.w[i][3] * d0.x[i] + taps.w[i][2] * d1.x[i] + taps.w[i][1] * d2.x[i] +
                      taps.w[i][0] * d3.x[i];
          dx.store(out + (row - 3) * p.d_qkv_stride, out_vector);
        }
        w0 = w1;
        w1 = w2;
        w2 = w3;
        d0 = d1;
        d1 = d2;
        d2 = d3;
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    float* own = &sums[threadIdx.x / 32][(column + i) * kSums];
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) own[tap] = d_taps[i][tap];
    own[4] = d_bias[i];
  }
  __syncthreads();
  float* const out = scratch.taps + (part * scratch.channels + unit.channel) * kSums;
  for (int i = threadIdx.x; i < unit.width * kSums; i += kPreThreads) {
    float sum = 0.0f;
    for (int warp = 0; warp < kPreWarps; ++warp) sum += sums[warp][i];
    out[i] = sum;
  }
}

// Second stage: one thread a parameter, parts in order.
__global__ void gdn_pre_sums_kernel(const __grid_constant__ GdnPreBackwardParams p,
                                    Scratch scratch) {
  const std::int64_t channels = scratch.channels, hv = p.in.shape.value_heads;
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  const bool tap = i < channels * kSums;
  if (i >= channels * kSums + hv * 2) return;
  const std::int64_t at = tap ? i : i - channels * kSums, count = tap ? channels * kSums : hv * 2;
  const float* in = (tap ? scratch.taps : scratch.gates) + at;
  double sum = 0;
  for (std::int64_t part = 0; part < scratch.parts; ++part) sum += in[part * count];
  const auto value = static_cast<float>(sum);
  if (!tap)
    (at % 2 == 0 ? p.d_a_log : p.d_dt_bias)[at / 2] += value;
  else if (at % kSums < 4)
    p.d_conv_weight[at / kSums * 4 + at % kSums] += value;
  else if (p.d_conv_bias != nullptr)
    p.d_conv_bias[at / kSums] += value;
}

} // namespace

void gdn_pre_backward(const GdnPreBackwardParams& p, const LaunchContext& context) {
  const GdnShape& s = p.in.shape;
  check_front_end_shape(s, "gdn_pre_backward");
  check_scratch(context, gdn_pre_backward_scratch(s), "gdn_pre_backward");
  const int units = 2 * s.key_heads + s.value_heads + 1;
  const std::int64_t parts = gdn_pre_parts(s), channels = gdn_channels(s);
  auto* memory = static_cast<float*>(context.scratch);
  const Scratch scratch{memory, memory + parts * channels * kSums, parts, channels,
                        gdn_chunk_capacity(s.tokens, s.sequences)};
  const bool narrow = s.key_dim <= 128 && s.value_dim <= 128;
  const int values = narrow ? 4 : 8;
  const auto kernel = narrow ? gdn_pre_backward_kernel<4> : gdn_pre_backward_kernel<8>;
  kernel<<<static_cast<unsigned>(parts * units), kPreThreads, 0, context.stream>>>(
      p, units, scratch, vector_rows(p.in.qkv, p.in.qkv_stride, values),
      vector_rows(p.d_qkv, p.d_qkv_stride, values));
  check_launch("gdn_pre_backward_kernel");
  const std::int64_t sums = channels * kSums + 2 * std::int64_t{s.value_heads};
  gdn_pre_sums_kernel<<<static_cast<unsigned>((sums + 127) / 128), 128, 0, context.stream>>>(
      p, scratch);
  check_launch("gdn_pre_sums_kernel");
}

} // namespace gdn::kernels
