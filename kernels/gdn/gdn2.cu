// A CTA owns the state of one (sequence, value head) in registers: a warp 16 key rows, a lane every 32nd value column.
#include "kernels/common/matrix.cuh"
#include "kernels/gdn/gdn2.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 16; // key rows of a warp
constexpr int kMaxDim = kWarps * kRows;

struct Place {
  int sequence, head, key_head, gate_head;
  std::int64_t first_token, tokens, first_chunk, chunks;
  __device__ explicit Place(const Gdn2& p) {
    head = static_cast<int>(blockIdx.x % p.shape.value_heads);
    sequence = p.table.order[blockIdx.x / p.shape.value_heads];
    key_head = head * p.shape.key_heads / p.shape.value_heads;
    gate_head = head * p.gate_heads / p.shape.value_heads;
    first_chunk = p.table.offsets[sequence];
    chunks = p.table.offsets[sequence + 1] - first_chunk;
    first_token = chunks > 0 ? p.table.chunks[first_chunk].first_token : 0;
    tokens = chunks > 0 ? (chunks - 1) * kChunk + p.table.chunks[first_chunk + chunks - 1].rows : 0;
  }
};

// One token's vectors, zero past the widths.
struct Token {
  float q[kMaxDim], k[kMaxDim], e[kMaxDim], b[kMaxDim], decay[kMaxDim]; // e = b * k
  float v[kMaxDim], w[kMaxDim], d_o[kMaxDim];
};

struct Shared {
  Token token;
  float sums[2][kWarps][kMaxDim]; // two, so that one barrier between uses is enough
};

__device__ void load_token(const Gdn2& p, const Place& at, Shared& s, std::int64_t t, const Matrix& d_o) {
  __syncthreads(); // the token before is done
  const int dk = p.shape.key_dim, dv = p.shape.value_dim, i = threadIdx.x;
  if (i < kMaxDim) {
    const bool key = i < dk, value = i < dv;
    const float k = key ? load_value(p.k, t, std::int64_t{at.key_head} * dk + i) : 0.0f;
    const float b = key ? load_value(p.b, t, std::int64_t{at.gate_head} * dk + i) : 0.0f;
    s.token.q[i] = key ? load_value(p.q, t, std::int64_t{at.key_head} * dk + i) : 0.0f;
    s.token.k[i] = k;
    s.token.b[i] = b;
    s.token.e[i] = b * k;
    s.token.decay[i] = key ? expf(load_value(p.g, t, std::int64_t{at.gate_head} * dk + i)) : 1.0f;
    s.token.v[i] = value ? load_value(p.v, t, std::int64_t{at.head} * dv + i) : 0.0f;
    s.token.w[i] = value ? load_value(p.w, t, std::int64_t{at.head} * dv + i) : 0.0f;
    s.token.d_o[i] = value && d_o.data ? load_value(d_o, t, std::int64_t{at.head} * dv + i) : 0.0f;
  }
  __syncthreads();
}

// Sums over the key rows of all warps, a value per column of the thread.
template <int kCols>
__device__ void column_totals(Shared& s, int which, float (&x)[kCols]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kCols; ++j) s.sums[which][warp][lane + 32 * j] = x[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    x[j] = 0.0f;
    for (int w = 0; w < kWarps; ++w) x[j] += s.sums[which][w][lane + 32 * j];
  }
}

// S <- Diag(decay) S; u; S <- S + k u^T.
template <int kCols>
__device__ void advance(const Shared& s, Shared& mine, float (&state)[kRows][kCols], float (&u)[kCols]) {
  const int row = threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kCols; ++j) u[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      state[i][j] *= s.token.decay[row + i];
      u[j] += s.token.e[row + i] * state[i][j];
    }
  column_totals(mine, 0, u);
#pragma unroll
  for (int j = 0; j < kCols; ++j) u[j] = s.token.w[lane + 32 * j] * s.token.v[lane + 32 * j] - u[j];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j) state[i][j] += s.token.k[row + i] * u[j];
}

// States as [dk, dv] in memory.
template <int kCols>
__device__ void store_state(const Gdn2& p, const float (&state)[kRows][kCols], float* to) {
  const int row = threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j)
      if (row + i < p.shape.key_dim && lane + 32 * j < p.shape.value_dim) to[(row + i) * p.shape.value_dim + lane + 32 * j] = state[i][j];
}
template <int kCols>
__device__ void load_state(const Gdn2& p, float (&state)[kRows][kCols], const float* from) {
  const int row = threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCols; ++j)
      state[i][j] = row + i < p.shape.key_dim && lane + 32 * j < p.shape.value_dim ? from[(row + i) * p.shape.value_dim + lane + 32 * j] : 0.0f;
}

template <int kCols>
__global__ void __launch_bounds__(kThreads) gdn2_forward_kernel(const __grid_constant__ Gdn2 p, Matrix o) {
  __shared__ Shared s;
  const Place at(p);
  const int row = threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
  const std::int64_t size = std::int64_t{p.shape.key_dim} * p.shape.value_dim;
  float* const kept = p.state ? p.state + (std::int64_t{p.slots[at.sequence]} * p.shape.value_heads + at.head) * size : nullptr;
  float state[kRows][kCols] = {};
  if (kept) load_state<kCols>(p, state, kept);
  for (std::int64_t t = at.first_token; t < at.first_token + at.tokens; ++t) {
    load_token(p, at, s, t, {});
    float u[kCols], read[kCols] = {};
    advance<kCols>(s, s, state, u);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kCols; ++j) read[j] += s.token.q[row + i] * state[i][j];
    column_totals(s, 1, read);
    if (threadIdx.x < 32) {
#pragma unroll
      for (int j = 0; j < kCols; ++j)
        if (const int c = lane + 32 * j; c < p.shape.value_dim) store_value(o, t, std::int64_t{at.head} * p.shape.value_dim + c, p.scale * read[j]);
    }
    if (p.token_state) store_state<kCols>(p, state, p.token_state + (t * p.shape.value_heads + at.head) * size);
  }
  if (kept) store_state<kCols>(p, state, kept);
}

// parts [T, Hv, 4, dk]: gradients of q, k, b, g by value head.
template <int kCols>
__global__ void __launch_bounds__(kThreads, 1)
    gdn2_backward_kernel(const __grid_constant__ Gdn2 p, const __grid_constant__ Gdn2Backward d, float* checkpoints, float* window, float* parts) {
  __shared__ Shared s;
  const Place at(p);
  const int row = threadIdx.x / 32 * kRows, lane = threadIdx.x % 32, dk = p.shape.key_dim, dv = p.shape.value_dim;
  const std::int64_t state_size = std::int64_t{dk} * dv;
  float* const states = window + blockIdx.x * kChunk * (state_size + dv); // before every token of the chunk in work
  float* const us = states + kChunk * state_size;
  float state[kRows][kCols] = {};
  for (std::int64_t c = 0; c < at.chunks; ++c) {
    store_state<kCols>(p, state, checkpoints + ((at.first_chunk + c) * p.shape.value_heads + at.head) * state_size);
    for (std::int64_t t = c * kChunk; t < min(at.tokens, (c + 1) * kChunk); ++t) {
      load_token(p, at, s, at.first_token + t, {});
      float u[kCols];
      advance<kCols>(s, s, state, u);
    }
  }
  float d_state[kRows][kCols] = {};
  for (std::int64_t c = at.chunks - 1; c >= 0; --c) {
    const int count = static_cast<int>(min(std::int64_t{kChunk}, at.tokens - c * kChunk));
    load_state<kCols>(p, state, checkpoints + ((at.first_chunk + c) * p.shape.value_heads + at.head) * state_size);
    for (int i = 0; i < count; ++i) {
      store_state<kCols>(p, state, states + i * state_size);
      load_token(p, at, s, at.first_token + c * kChunk + i, {});
      float u[kCols];
      advance<kCols>(s, s, state, u);
      if (threadIdx.x < 32) {
#pragma unroll
        for (int j = 0; j < kCols; ++j)
          if (lane + 32 * j < dv) us[i * dv + lane + 32 * j] = u[j];
      }
    }
    __syncthreads(); // u of one warp is read by all
    for (int token = count - 1; token >= 0; --token) {
      const std::int64_t t = at.first_token + c * kChunk + token;
      load_token(p, at, s, t, d.d_o);
      load_state<kCols>(p, state, states + token * state_size);
      float u[kCols], du[kCols] = {};
#pragma unroll
      for (int j = 0; j < kCols; ++j) u[j] = lane + 32 * j < dv ? us[token * dv + lane + 32 * j] : 0.0f;
      float dq[kRows], dk_sum[kRows], de[kRows], dg[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float q = s.token.q[row + i], k = s.token.k[row + i], decay = s.token.decay[row + i];
        dq[i] = dk_sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const float d_o = p.scale * s.token.d_o[lane + 32 * j];
          state[i][j] *= decay; // S before the write
          dq[i] += (state[i][j] + k * u[j]) * d_o;
          d_state[i][j] += q * d_o;
          du[j] += k * d_state[i][j];
          dk_sum[i] += d_state[i][j] * u[j];
        }
      }
      column_totals(s, 1, du);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float e = s.token.e[row + i], decay = s.token.decay[row + i];
        de[i] = dg[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          de[i] -= state[i][j] * du[j];
          d_state[i][j] -= e * du[j];
          dg[i] += state[i][j] * d_state[i][j];
          d_state[i][j] *= decay;
        }
      }
      float* const out = parts + (t * p.shape.value_heads + at.head) * 4 * dk;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float a = lane_sum<32>(dq[i]), b = lane_sum<32>(dk_sum[i]), x = lane_sum<32>(de[i]), g = lane_sum<32>(dg[i]);
        if (lane == 0 && row + i < dk) {
          out[row + i] = a;
          out[dk + row + i] = b + s.token.b[row + i] * x;
          out[2 * dk + row + i] = s.token.k[row + i] * x;
          out[3 * dk + row + i] = g;
        }
      }
      if (threadIdx.x < 32) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const int column = lane + 32 * j;
          if (column >= dv) continue;
          put_value(d.dv, t, std::int64_t{at.head} * dv + column, s.token.w[column] * du[j]);
          put_value(d.dw, t, std::int64_t{at.head} * dv + column, s.token.v[column] * du[j]);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) chunk_sums_kernel(Matrix g, GdnChunkTable table, Matrix sums) {
  const GdnChunk chunk = table.chunks[blockIdx.x];
  const std::int64_t c = blockIdx.y * std::int64_t{kThreads} + threadIdx.x;
  if (chunk.kind != GdnChunk::kTokens || c >= g.cols) return;
  float sum = 0.0f;
  for (std::int64_t t = chunk.first_token; t < chunk.first_token + chunk.rows; ++t) store_value(sums, t, c, sum += load_value(g, t, c));
}

struct SumParams {
  const float* parts;
  int value_heads, heads, key_dim, which; // heads of the result
  Gradient to;
};
template <int N>
struct SumHeads { // over the columns of the result
  SumParams p;
  __device__ void operator()(std::int64_t t, std::int64_t c) const {
    const std::int64_t head = c / p.key_dim, i = c % p.key_dim, group = p.value_heads / p.heads;
    float sum = 0.0f;
    for (std::int64_t h = head * group; h < (head + 1) * group; ++h)
      sum += p.parts[((t * p.value_heads + h) * 4 + p.which) * p.key_dim + i];
    put_value(p.to, t, c, sum);
  }
};

void check(const Gdn2& p, const char* kernel) {
  const GdnShape& s = p.shape;
  if (s.key_dim > kMaxDim || s.value_dim > kMaxDim || s.value_heads % s.key_heads != 0 || p.gate_heads < 1 || s.value_heads % p.gate_heads != 0)
    refuse(kernel, {{"key width", s.key_dim}, {"value width", s.value_dim}, {"key heads", s.key_heads}, {"gate heads", p.gate_heads},
                    {"value heads", s.value_heads}}, "widths up to 128, value heads a multiple of the others");
}

template <class F>
void dispatch(int value_dim, F&& f) {
  if (value_dim <= 32) f(std::integral_constant<int, 1>());
  else f(std::integral_constant<int, 4>());
}

} // namespace

void gdn2_forward(const Gdn2& p, const Matrix& o, const LaunchContext& context) {
  check(p, "gdn2_forward");
  const auto ctas = static_cast<unsigned>(p.shape.sequences * p.shape.value_heads);
  if (ctas == 0) return;
  dispatch(p.shape.value_dim, [&](auto cols) { gdn2_forward_kernel<cols.value><<<ctas, kThreads, 0, context.stream>>>(p, o); });
  check_launch("gdn2_forward_kernel");
}

void chunk_sums(const Matrix& g, const GdnShape& shape, const GdnChunkTable& table, const Matrix& sums, const LaunchContext& context) {
  if (g.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(gdn_chunk_capacity(shape.tokens, shape.sequences)), static_cast<unsigned>((g.cols + kThreads - 1) / kThreads));
  chunk_sums_kernel<<<grid, kThreads, 0, context.stream>>>(g, table, sums);
  check_launch("chunk_sums_kernel");
}

void gdn2_backward(const Gdn2& p, const Gdn2Backward& d, const LaunchContext& context) {
  check(p, "gdn2_backward");
  require_scratch(context, gdn2_backward_scratch(p.shape), "gdn2_backward");
  const GdnShape& s = p.shape;
  const auto ctas = static_cast<unsigned>(s.sequences * s.value_heads);
  if (ctas == 0) return;
  const std::int64_t state = std::int64_t{s.key_dim} * s.value_dim;
  auto* const checkpoints = static_cast<float*>(context.scratch);
  auto* const window = checkpoints + gdn_chunk_capacity(s.tokens, s.sequences) * s.value_heads * state;
  auto* const parts = window + ctas * kChunk * (state + s.value_dim);
  dispatch(s.value_dim, [&](auto cols) {
    gdn2_backward_kernel<cols.value><<<ctas, kThreads, 0, context.stream>>>(p, d, checkpoints, window, parts);
  });
  check_launch("gdn2_backward_kernel");
  const Gradient* const to[] = {&d.dq, &d.dk, &d.db, &d.dg};
  for (int i = 0; i < 4; ++i)
    for_rows<SumHeads>(SumParams{parts, s.value_heads, i < 2 ? s.key_heads : p.gate_heads, s.key_dim, i, *to[i]}, to[i]->to.rows, to[i]->to.cols,
                       false, context, "gdn2 gradients");
}

} // namespace gdn::kernels
