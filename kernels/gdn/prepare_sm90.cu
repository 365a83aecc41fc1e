// Chunk-parallel preparation: log decay inside the chunk, inverse norms of q and k, the factors of
// every row, the intra-chunk attention P and the triangular matrix N. One CTA per (chunk, key
// head); K K^T and Q K^T are shared by the value heads of the key head.
//
// N solves (I + A B) N = A with A = stril(K K^T): T = (I + B A)^-1 = I - B N. The solve sees no
// decay; N is multiplied by Lambda when stored. 16x16 diagonal blocks are solved row by row in fp32
// and merged by block forward substitution with tf32 products split in three (about fp32 accuracy).
#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

constexpr int kPitch = 72;      // floats per row of A: 8-byte fragment reads without conflicts
constexpr int kBlockPitch = 24; // floats per row of a diagonal block of N
constexpr int kBlockStride = 16 * kBlockPitch + 16;

struct Shared {
  union {
    struct {
      char q[kKeyTiles * kTileBytes];
      char k[kKeyTiles * kTileBytes];
    };
    struct {
      float a[kChunk * kPitch]; // after the products: stril(K K^T), norms applied
      alignas(1024) char n0[kTileBytes];
    };
  };
  union {
    char p[kTileBytes]; // rows on their way out, 16 per warp
    char n1[kTileBytes];
  };
  float diagonal[2][4][kBlockStride];
  float gamma[2][kChunk], beta[2][kChunk];
  float q_norm[kChunk], k_norm[kChunk];
  std::uint64_t loaded;
};

// x = high + low, both exact in tf32 up to the last bits of low.
struct Split {
  std::uint32_t high, low;
  __device__ explicit Split(float x) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// d (16 x 16, two column tiles) += left^T-fragment * right, contraction over 16. `left` is an
// accumulator of the previous product; `right` points at row g, column 2t of the 16x16 block whose
// ROWS are the output columns.
__device__ __forceinline__ void multiply_block(float (&d)[8], const float (&left)[8],
                                               const float* right, int pitch) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const Split a0(left[4 * k]), a1(left[4 * k + 2]), a2(left[4 * k + 1]), a3(left[4 * k + 3]);
    const std::uint32_t a_high[4] = {a0.high, a1.high, a2.high, a3.high};
    const std::uint32_t a_low[4] = {a0.low, a1.low, a2.low, a3.low};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(right + 8 * n * pitch + 8 * k);
      const Split b0(pair.x), b1(pair.y);
      const std::uint32_t b_high[2] = {b0.high, b1.high}, b_low[2] = {b0.low, b1.low};
      float(&tile)[4] = *reinterpret_cast<float(*)[4]>(&d[4 * n]);
      mma_tf32(tile, a_low, b_high);
      mma_tf32(tile, a_high, b_low);
      mma_tf32(tile, a_high, b_high);
    }
  }
}

// One column of a 16x16 diagonal block of N: n_i = A_ic - sum_{j<i} A_ij beta_j n_j.
__device__ __forceinline__ void solve_diagonal(Shared& s, int head, int block, int column) {
  const float* a = s.a + 16 * block * kPitch + 16 * block;
  const float* beta = s.beta[head] + 16 * block;
  float* out = s.diagonal[head][block] + column;
  float scaled[16]; // beta_j n_j
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int j = 0; j < i; j += 4)
      *reinterpret_cast<float4*>(&row[j]) = *reinterpret_cast<const float4*>(&a[i * kPitch + j]);
    float n = a[i * kPitch + column], other = 0.0f; // two chains
#pragma unroll
    for (int j = 0; j < i; ++j) (j % 2 == 0 ? n : other) -= row[j] * scaled[j];
    n += other;
    scaled[i] = beta[i] * n;
    out[i * kBlockPitch] = n;
  }
}

// Block column `column` of N below the diagonal, one warp, kept transposed (rows = columns of N):
// X_i = A_ic - sum_j A_ij B_j N_jc, N_ic = X_i - N_ii B_i X_i. Then times Lambda, rounded, stored.
__device__ __forceinline__ void merge_column(const Shared& s, std::uint32_t tile, int head,
                                             int column, const Lane& at) {
  float y[4][8]; // y[d] = transposed block N[column + d][column]
  const float* beta = s.beta[head];
  const float* gamma = s.gamma[head];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const int i = column + d;
    if (i >= 4) break;
    const float* own = s.diagonal[head][i];
    if (d == 0) {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        y[0][e] = own[(8 * (e / 4) + 2 * at.t + e % 2) * kBlockPitch + at.g + 8 * (e % 4 / 2)];
      continue;
    }
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e)
      x[e] = s.a[(16 * i + 8 * (e / 4) + 2 * at.t + e % 2) * kPitch + 16 * column + at.g +
                 8 * (e % 4 / 2)];
#pragma unroll
    for (int f = 0; f < d; ++f) {
      const int j = column + f;
      float left[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        left[e] = -beta[16 * j + 8 * (e / 4) + 2 * at.t + e % 2] * y[f][e];
      multiply_block(x, left, s.a + (16 * i + at.g) * kPitch + 16 * j + 2 * at.t, kPitch);
    }
    float left[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      left[e] = -beta[16 * i + 8 * (e / 4) + 2 * at.t + e % 2] * x[e];
      y[d][e] = x[e];
    }
    multiply_block(y[d], left, own + at.g * kBlockPitch + 2 * at.t, kBlockPitch);
  }
  const int matrix = at.lane / 8, r = at.lane % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float gated[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = 16 * i + 8 * (e / 4) + 2 * at.t + e % 2; // of N
      const int col = 16 * column + at.g + 8 * (e % 4 / 2);
      float value = 0.0f;
#pragma unroll
      for (int d = 0; d < 4; ++d)
        if (column + d == i) value = y[d][e];
      gated[e] = row > col ? value * exp2_fast(gamma[row] - gamma[col]) : 0.0f;
    }
    store_matrix_transposed(tile + in_tile(16 * i + 8 * (matrix / 2) + r, 2 * column + matrix % 2),
                            pack_bf16(gated[0], gated[1]), pack_bf16(gated[2], gated[3]),
                            pack_bf16(gated[4], gated[5]), pack_bf16(gated[6], gated[7]));
  }
}

// Decay and write strength of two rows of one value head, one warp a head; fetched ahead of their
// use.
struct Gates {
  float decay[2], beta[2]; // decay: g, or its prefix sum as saved
};

__device__ __forceinline__ Gates fetch_gates(const RuleArgs& a, int head, const GdnChunk& chunk,
                                             int lane) {
  const int i = 2 * lane;
  const std::int64_t start = static_cast<std::int64_t>(chunk.first_token) * a.value_heads + head;
  const float* decay = a.gamma != nullptr ? a.gamma : a.g;
  Gates gates;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const bool valid = i + x < chunk.rows;
    // Past the end: the last valid row's prefix sum, or g = 0, which comes to the same.
    const std::int64_t row = valid ? i + x : chunk.rows - 1;
    gates.decay[x] = valid || a.gamma != nullptr ? decay[start + row * a.value_heads] : 0.0f;
    gates.beta[x] = valid ? a.beta[start + row * a.value_heads] : 0.0f;
  }
  return gates;
}

__device__ __forceinline__ void place_gates(const RuleArgs& a, Shared& s, const Gates& gates,
                                            int slot, int head, const GdnChunk& chunk, int lane) {
  const int i = 2 * lane;
  float gamma0 = gates.decay[0], gamma1 = gates.decay[1];
  if (a.gamma == nullptr) { // inclusive prefix sum
    gamma1 += gamma0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(~0u, gamma1, step);
      if (lane >= step) gamma1 += before;
    }
    const float before = __shfl_up_sync(~0u, gamma1, 1);
    if (lane > 0) gamma0 += before;
  }
  if (a.gamma_out != nullptr) {
    const std::int64_t at =
        (static_cast<std::int64_t>(chunk.first_token) + i) * a.value_heads + head;
    if (i < chunk.rows) a.gamma_out[at] = gamma0;
    if (i + 1 < chunk.rows) a.gamma_out[at + a.value_heads] = gamma1;
  }
  constexpr float kLog2e = 1.4426950408889634f;
  *reinterpret_cast<float2*>(&s.gamma[slot][i]) = make_float2(gamma0 * kLog2e, gamma1 * kLog2e);
  *reinterpret_cast<float2*>(&s.beta[slot][i]) = make_float2(gates.beta[0], gates.beta[1]);
}

// Inverse norm of a row of 128 columns, two threads a row.
__device__ __forceinline__ float inverse_norm(const char* tiles, int row, int half, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint4 x =
        *reinterpret_cast<const uint4*>(tiles + half * kTileBytes + in_tile(row, piece));
    const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum += bf16_low(words[w]) * bf16_low(words[w]);
      sum += bf16_high(words[w]) * bf16_high(words[w]);
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return rsqrtf(sum + epsilon);
}

__device__ void write_zeros(void* out, std::int64_t bytes) { // multiple of 16
  for (std::int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    static_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
}

// Rows past the last sequence: every forward output of this key head's value heads is zero.
__device__ void zero_padding(const RuleArgs& a, const GdnChunk& chunk, int key_head) {
  for (int r = 0; r < chunk.rows; ++r) {
    const std::int64_t token = chunk.first_token + r;
    const std::int64_t row = token * a.value_heads + key_head * a.group;
    if (a.n_out != nullptr) write_zeros(a.n_out + row * kChunk, a.group * kChunk * 2);
    if (a.o != nullptr)
      write_zeros(a.o + row * a.value_dim, std::int64_t{2} * a.group * a.value_dim);
    if (a.gamma_out != nullptr && threadIdx.x < a.group) a.gamma_out[row + threadIdx.x] = 0.0f;
    if (a.q_rstd != nullptr && threadIdx.x == 0) a.q_rstd[token * a.key_heads + key_head] = 0.0f;
    if (a.k_rstd != nullptr && threadIdx.x == 0) a.k_rstd[token * a.key_heads + key_head] = 0.0f;
  }
}

__global__ void __launch_bounds__(kWarpgroup, 4)
    gdn_prepare_kernel(const __grid_constant__ RuleArgs a) {
  extern __shared__ __align__(1024) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const std::int64_t chunk_index = blockIdx.x / a.key_heads;
  const int key_head = blockIdx.x % a.key_heads;
  const GdnChunk chunk = a.chunks[chunk_index];
  if (chunk.kind == GdnChunk::kUnused) return;
  if (chunk.kind == GdnChunk::kPadding) {
    zero_padding(a, chunk, key_head);
    return;
  }
  const Lane at;
  const int thread = threadIdx.x;

  if (thread == 0) {
    barrier_init(&s.loaded, 1);
    barrier_init_fence();
    barrier_expect(&s.loaded, 2 * kKeyTiles * kTileBytes);
    for (int half = 0; half < kKeyTiles; ++half) {
      load_box(s.q + half * kTileBytes, &a.q, &s.loaded, 64 * half, key_head, chunk.first_token);
      load_box(s.k + half * kTileBytes, &a.k, &s.loaded, 64 * half, key_head, chunk.first_token);
    }
  }
  const int first_head = key_head * a.group;
  Gates gates{};
  if (at.warp < min(2, a.group)) gates = fetch_gates(a, first_head + at.warp, chunk, at.lane);
  __syncthreads();
  barrier_wait(&s.loaded, 0);
  if (chunk.rows < kChunk) {
    zero_tail(s.q, 2 * kKeyTiles, chunk.rows, thread, kWarpgroup);
    fence_async_proxy();
    __syncthreads();
  }

  float qk[32], kk[32];
  const std::uint32_t q_tiles = descriptor(smem_address(s.q)),
                      k_tiles = descriptor(smem_address(s.k));
  products_begin();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t step = (k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4);
    product<Contract::kAlongRow, Contract::kAlongRow>(kk, k_tiles + step, k_tiles + step, k > 0);
    product<Contract::kAlongRow, Contract::kAlongRow>(qk, q_tiles + step, k_tiles + step, k > 0);
  }
  products_commit();

  const int row = thread / 2;
  float q_norm = 1.0f, k_norm = 1.0f;
  if (a.l2_norm) {
    q_norm = inverse_norm(s.q, row, thread % 2, a.l2_epsilon);
    k_norm = inverse_norm(s.k, row, thread % 2, a.l2_epsilon);
  }
  if (thread % 2 == 0) {
    s.q_norm[row] = q_norm;
    s.k_norm[row] = k_norm;
    const std::int64_t token = static_cast<std::int64_t>(chunk.first_token) + row;
    if (row < chunk.rows && a.q_rstd != nullptr) a.q_rstd[token * a.key_heads + key_head] = q_norm;
    if (row < chunk.rows && a.k_rstd != nullptr) a.k_rstd[token * a.key_heads + key_head] = k_norm;
  }
  products_wait<0>(qk, kk);
  __syncthreads(); // q and k are read, norms are written: their memory becomes A and N

#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    const int i = at.row() + 8 * (e % 4 / 2), j = 8 * (e / 4) + 2 * at.t;
    const float left = s.k_norm[i];
    *reinterpret_cast<float2*>(&s.a[i * kPitch + j]) =
        make_float2(i > j ? left * s.k_norm[j] * kk[e] : 0.0f,
                    i > j + 1 ? left * s.k_norm[j + 1] * kk[e + 1] : 0.0f);
  }

  for (int first = 0; first < a.group; first += 2) {
    const int heads = min(2, a.group - first);
    const std::int64_t head0 = chunk_index * a.value_heads + first_head + first;
    __syncthreads();
    if (at.warp < heads)
      place_gates(a, s, gates, at.warp, first_head + first + at.warp, chunk, at.lane);
    if (at.warp < min(2, a.group - first - 2)) // the next pair's
      gates = fetch_gates(a, first_head + first + 2 + at.warp, chunk, at.lane);
    __syncthreads();

    const int slot = thread / 64;
    if (slot < heads) {
      const int i = thread % 64;
      float* out = a.factors + (head0 + slot) * kFactors * kChunk + i;
      const float valid = i < chunk.rows ? 1.0f : 0.0f;
      const float gamma = s.gamma[slot][i], beta = s.beta[slot][i], decay = exp2_fast(gamma);
      const float rest = exp2_fast(s.gamma[slot][kChunk - 1] - gamma);
      const float q_scale = valid * s.q_norm[i], k_scale = valid * s.k_norm[i];
      out[kGamma * kChunk] = gamma;
      out[kBeta * kChunk] = beta;
      out[kQueryDecay * kChunk] = a.scale * q_scale * decay;
      out[kKeyDecay * kChunk] = k_scale * decay;
      out[kWriteRest * kChunk] = beta * k_scale * rest;
      out[kKeyRest * kChunk] = k_scale * rest;
      out[kWriteDecay * kChunk] = beta * k_scale * decay;
      out[kQueryNorm * kChunk] = q_scale;
      out[kKeyNorm * kChunk] = k_scale;
      if (a.n_out != nullptr) solve_diagonal(s, slot, i / 16, i % 16);
    }
    for (int h = 0; h < heads; ++h) {
      float p[32];
      float gamma_i[2], left[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        gamma_i[x] = s.gamma[h][at.row() + 8 * x];
        left[x] = a.scale * s.q_norm[at.row() + 8 * x];
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int j = 8 * n + 2 * at.t;
        const float2 gamma_j = *reinterpret_cast<const float2*>(&s.gamma[h][j]);
        float2 right = *reinterpret_cast<const float2*>(&s.k_norm[j]);
        if (a.scale_p_by_beta) {
          right.x *= s.beta[h][j];
          right.y *= s.beta[h][j + 1];
        }
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int i = at.row() + 8 * x, e = 4 * n + 2 * x;
          const float p0 = qk[e] * left[x] * right.x * exp2_fast(gamma_i[x] - gamma_j.x);
          const float p1 = qk[e + 1] * left[x] * right.y * exp2_fast(gamma_i[x] - gamma_j.y);
          p[e] = i >= j ? p0 : 0.0f;
          p[e + 1] = i >= j + 1 ? p1 : 0.0f;
        }
      }
      store_tile(smem_address(s.p), at, p); // a warp writes and reads its own 16 rows
      __syncwarp();
      const int offset = at.warp * 2048 + at.lane * 16;
      char* image = a.p + (head0 + h) * kTileBytes;
#pragma unroll
      for (int x = 0; x < 4; ++x)
        *reinterpret_cast<uint4*>(image + offset + x * 512) =
            *reinterpret_cast<const uint4*>(s.p + offset + x * 512);
      __syncwarp();
    }
    __syncthreads();

    if (a.n_out == nullptr) continue;
    for (int h = 0; h < heads; ++h) // warps take columns of unequal cost: 0..3, then 3..0
      merge_column(s, smem_address(h == 0 ? s.n0 : s.n1), h, h == 0 ? at.warp : 3 - at.warp, at);
    __syncthreads();
    for (int h = 0; h < heads; ++h) {
      const int head = first_head + first + h;
      write_rows(a.n_out +
                     (static_cast<std::int64_t>(chunk.first_token) * a.value_heads + head) * kChunk,
                 static_cast<std::int64_t>(a.value_heads) * kChunk, h == 0 ? s.n0 : s.n1,
                 chunk.rows, kChunk);
    }
  }
}

} // namespace

void launch_prepare(const RuleArgs& args, const LaunchContext& context) {
  GDN_CUDA(cudaFuncSetAttribute(gdn_prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(Shared)));
  const auto ctas = static_cast<unsigned>(args.capacity * args.key_heads);
  gdn_prepare_kernel<<<ctas, kWarpgroup, sizeof(Shared), context.stream>>>(args);
  check_launch("gdn_prepare_kernel");
}

} // namespace gdn::kernels
