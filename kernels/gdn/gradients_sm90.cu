// Chunk-parallel gradients, after both scans: everything but the states' own chain. Persistent CTAs
// walk (chunk, key head) items; the value heads of a key head follow each other and dq, dk stay in
// registers meanwhile. Two math warpgroups own one half of the key columns each; the 64x64 products
// are divided between them (dO Z^T and E Z^T) and exchanged through shared memory as bf16.
//
//   D_ij = s rho_q,i rho_k,j Lambda_ij beta_j (dO_i . Z_j)          i >= j
//   F_ij = - rho_k,i rho_k,j Lambda_ij beta_i beta_j (E_i . Z_j)    i > j        dbeta_i = E_i .
//   Z_i dq   = H1 + D k              H1 = (s rho_q e^gamma) dO S^T dk   = H2 + H3 + D^T q + (F +
//   F^T) k
//                                H2 = -(rho_k e^gamma beta) E S^T
//                                H3 = (rho_k e^(gamma_last-gamma) beta) Z dS^T
//   y_i  = q_i . H1_i + k_i . H2_i     z_i = k_i . H3_i     W = D * (q k^T) + F * (k k^T)  (i > j)
//   dg_t = e^gamma_last <S, dS> + sum_{i>=t} y_i + sum_{i<t} z_i + sum_{i>=t>j} W_ij
//   dv   = beta E
// q and k are the raw rows; the norms sit in the factors, and the gradient of the norm is applied
// once per key head at the end.
#include <cstddef>

#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

constexpr int kMath = 2 * kWarpgroup;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kMathBarrier = 1, kOwnBarrier = 2; // kOwnBarrier + warpgroup

template <int kTiles> // value_tiles
struct Layout {
  static constexpr int kStages = kTiles <= 2 ? 2 : 1;
  struct Shared {
    char q[kKeyTiles * kTileBytes]; // then dq
    char k[kKeyTiles * kTileBytes]; // then dk
    char d[kTileBytes];
    char f[kTileBytes];
    char state[kTiles * kStateBytes];
    char d_state[kTiles * kStateBytes];
    char z[kStages][kTiles * kTileBytes];
    char e[kStages][kTiles * kTileBytes];
    char d_o[kStages][kTiles * kTileBytes];
    float factors[kStages][kFactors][kChunk];
    float w[2][8][kChunk]; // partial sums over rows of W, per warp; double buffered over heads
    float y[2][2][kChunk]; // per warpgroup
    float z_dot[2][2][kChunk];
    float c[2][8];                // per warp
    float norm_dot[2][2][kChunk]; // q, k; per warpgroup
    std::uint64_t keys_full, keys_empty, states_full, states_empty;
    std::uint64_t rows_full[kStages], rows_empty[kStages];
  };
  static constexpr int kRowBytes = 3 * kTiles * kTileBytes + kFactorBytes;
};

template <int kTiles>
__device__ void feed(const RuleArgs& a, typename Layout<kTiles>::Shared& s) {
  using L = Layout<kTiles>;
  const std::int64_t items = static_cast<std::int64_t>(a.offsets[a.sequences]) * a.key_heads;
  Ring<L::kStages> rows;
  Ring<1> keys, states;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x, keys.advance()) {
    const std::int64_t chunk = item / a.key_heads;
    const int key_head = static_cast<int>(item % a.key_heads);
    const int token = a.chunks[chunk].first_token;
    barrier_wait(&s.keys_empty, keys.parity ^ 1);
    barrier_expect(&s.keys_full, 2 * kKeyTiles * kTileBytes);
    for (int half = 0; half < kKeyTiles; ++half) {
      load_box(s.q + half * kTileBytes, &a.q, &s.keys_full, 64 * half, key_head, token);
      load_box(s.k + half * kTileBytes, &a.k, &s.keys_full, 64 * half, key_head, token);
    }
    for (int h = 0; h < a.group; ++h, rows.advance(), states.advance()) {
      const int i = rows.stage;
      const int value_head = key_head * a.group + h;
      const std::int64_t head = chunk * a.value_heads + value_head;
      barrier_wait(&s.rows_empty[i], rows.parity ^ 1);
      barrier_expect(&s.rows_full[i], L::kRowBytes);
      load_bulk(s.z[i], a.z + head * kTiles * kTileBytes, kTiles * kTileBytes, &s.rows_full[i]);
      for (int tile = 0; tile < kTiles; ++tile)
        load_box(s.d_o[i] + tile * kTileBytes, &a.d_o, &s.rows_full[i], 64 * tile, value_head,
                 token);
      load_bulk(s.e[i], a.e + head * kTiles * kTileBytes, kTiles * kTileBytes, &s.rows_full[i]);
      load_bulk(s.factors[i], a.factors + head * kFactors * kChunk, kFactorBytes, &s.rows_full[i]);
      barrier_wait(&s.states_empty, states.parity ^ 1);
      barrier_expect(&s.states_full, 2 * kTiles * kStateBytes);
      load_bulk(s.state, a.states + head * kTiles * kStateBytes, kTiles * kStateBytes,
                &s.states_full);
      load_bulk(s.d_state, a.d_states + head * kTiles * kStateBytes, kTiles * kStateBytes,
                &s.states_full);
    }
  }
}

// d (64 x 64) = left right^T, both [64 tokens, kTiles x 64 columns]. Operands are descriptors.
template <int kTiles>
__device__ __forceinline__ void token_product(float (&d)[32], std::uint32_t left,
                                              std::uint32_t right) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k) {
    const std::uint32_t step = (k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4);
    product<Contract::kAlongRow, Contract::kAlongRow>(d, left + step, right + step, k > 0);
  }
}

// d (64 tokens x 64 keys) = left (tokens x values) times one key half of a stored state (values x
// keys).
template <int kTiles>
__device__ __forceinline__ void state_product(float (&d)[32], std::uint32_t left,
                                              std::uint32_t state) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k)
    product<Contract::kAlongRow, Contract::kAcrossRows>(
        d, left + (k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4),
        state + (k / 4) * 2 * kNextTile + step_offset<Contract::kAcrossRows>(k % 4), k > 0);
}

// d (64 x 64 keys) += left right, or left^T right (kA = kAcrossRows); right [64 tokens, 64 keys].
template <Contract kA>
__device__ __forceinline__ void mix_product(float (&d)[32], std::uint32_t left,
                                            std::uint32_t right) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    product<kA, Contract::kAcrossRows>(d, left + step_offset<kA>(k),
                                       right + step_offset<Contract::kAcrossRows>(k));
}

// Sum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// One step of a sum over lanes that also divides the columns among them: lanes with bit `kMask`
// keep the upper half of v[0 .. 2 kCount), the others the lower half.
template <int kCount, int kMask>
__device__ __forceinline__ void add_and_halve(float (&v)[16], int lane) {
  const bool upper = lane & kMask;
#pragma unroll
  for (int x = 0; x < kCount; ++x) {
    const float low = v[x], high = v[x + kCount];
    v[x] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kMask);
  }
}

// For the strictly lower matrix w (accumulator layout): sum over this warp's rows i of
// sum_{j<t} w_ij for t <= i, as out[t].
__device__ __forceinline__ void straddling_sums(float* out, const float (&w)[32], const Lane& at) {
  float v[16]; // column 8n + 2t + e at 2n + e, summed over the rows g and g + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = at.row() + 8 * h;
    float before = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float w0 = w[4 * n + 2 * h], w1 = w[4 * n + 2 * h + 1];
      float sum = w0 + w1; // inclusive scan over the quad
      float left = __shfl_up_sync(~0u, sum, 1, 4);
      if (at.t >= 1) sum += left;
      left = __shfl_up_sync(~0u, sum, 2, 4);
      if (at.t >= 2) sum += left;
      float own = __shfl_up_sync(~0u, sum, 1, 4);
      own = before + (at.t >= 1 ? own : 0.0f);
      before += __shfl_sync(~0u, sum, 3, 4);
      const int t = 8 * n + 2 * at.t;
      const float first = t <= i ? own : 0.0f, second = t + 1 <= i ? own + w0 : 0.0f;
      v[2 * n] = h == 0 ? first : v[2 * n] + first;
      v[2 * n + 1] = h == 0 ? second : v[2 * n + 1] + second;
    }
  }
  add_and_halve<8, 16>(v, at.lane); // sum over g
  add_and_halve<4, 8>(v, at.lane);
  add_and_halve<2, 4>(v, at.lane);
  const int n = 4 * ((at.lane >> 4) & 1) + 2 * ((at.lane >> 3) & 1) + ((at.lane >> 2) & 1);
  *reinterpret_cast<float2*>(out + 8 * n + 2 * at.t) = make_float2(v[0], v[1]);
}

// Two adjacent elements of a key-half tile at this thread's accumulator position.
__device__ __forceinline__ float2 pair_at(const char* tile, int row, int n, int t) {
  const auto pair = *reinterpret_cast<const std::uint32_t*>(tile + in_tile(row, n) + 4 * t);
  return make_float2(bf16_low(pair), bf16_high(pair));
}

// dq += H1 with its row factor; y += row dots with q.
__device__ __forceinline__ void fold_read(float (&dq)[32], float (&y)[2], const float (&h)[32],
                                          const char* q, const float (&factor)[2], const Lane& at) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float2 row = pair_at(q, at.row() + 8 * x, n, at.t);
      const float h0 = factor[x] * h[4 * n + 2 * x], h1 = factor[x] * h[4 * n + 2 * x + 1];
      dq[4 * n + 2 * x] += h0;
      dq[4 * n + 2 * x + 1] += h1;
      y[x] += h0 * row.x + h1 * row.y;
    }
}

// dk += H2 + H3 with their row factors; y and z += their row dots with k.
__device__ __forceinline__ void fold_write(float (&dk)[32], float (&y)[2], float (&z)[2],
                                           const float (&h2)[32], const float (&h3)[32],
                                           const char* k, const float (&factor2)[2],
                                           const float (&factor3)[2], const Lane& at) {
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    float along2 = 0.0f, along3 = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 row = pair_at(k, at.row() + 8 * x, n, at.t);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int index = 4 * n + 2 * x + e;
        along2 += h2[index] * (e == 0 ? row.x : row.y);
        along3 += h3[index] * (e == 0 ? row.x : row.y);
        dk[index] += factor2[x] * h2[index] + factor3[x] * h3[index];
      }
    }
    y[x] += factor2[x] * along2;
    z[x] += factor3[x] * along3;
  }
}

// <S, dS> over key half `half`, this thread's part.
template <int kTiles>
__device__ __forceinline__ float state_dot(const char* state, const char* d_state, int half,
                                           int thread) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int offset =
        (i / 4) * kStateBytes + half * kTileBytes + (i % 4 * kWarpgroup + thread) * 16;
    const uint4 x = *reinterpret_cast<const uint4*>(state + offset);
    const uint4 y = *reinterpret_cast<const uint4*>(d_state + offset);
    const std::uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum += bf16_low(xs[w]) * bf16_low(ys[w]);
      sum += bf16_high(xs[w]) * bf16_high(ys[w]);
    }
  }
  return sum;
}

// dv rows = beta * E rows, for the value tiles of this warpgroup.
template <int kTiles>
__device__ __forceinline__ void write_dv(const RuleArgs& a, const char* e, const float* beta,
                                         const GdnChunk& chunk, int value_head, int me,
                                         int thread) {
  for (int tile = me; tile < kTiles; tile += 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int piece = thread + i * kWarpgroup, row = piece / 8, column = piece % 8;
      if (row >= chunk.rows || 64 * tile + 8 * column >= a.value_dim) continue;
      const uint4 x = *reinterpret_cast<const uint4*>(e + tile * kTileBytes + in_tile(row, column));
      const float b = beta[row];
      uint4 out;
      out.x = pack_bf16(b * bf16_low(x.x), b * bf16_high(x.x));
      out.y = pack_bf16(b * bf16_low(x.y), b * bf16_high(x.y));
      out.z = pack_bf16(b * bf16_low(x.z), b * bf16_high(x.z));
      out.w = pack_bf16(b * bf16_low(x.w), b * bf16_high(x.w));
      const std::int64_t token = static_cast<std::int64_t>(chunk.first_token) + row;
      *reinterpret_cast<uint4*>(a.dv + (token * a.value_heads + value_head) * a.value_dim +
                                64 * tile + 8 * column) = out;
    }
}

// Gate gradient of the 64 rows, by one warp: suffix sums of y, prefix sums of z, W and c.
__device__ __forceinline__ void write_dg(const RuleArgs& a, const float (*w)[kChunk],
                                         const float (*y)[kChunk], const float (*z)[kChunk],
                                         const float* c, float decay, const GdnChunk& chunk,
                                         int value_head, int lane) {
  const int t = 2 * lane;
  float y0 = y[0][t] + y[1][t], y1 = y[0][t + 1] + y[1][t + 1];
  float z0 = z[0][t] + z[1][t], z1 = z[0][t + 1] + z[1][t + 1];
  float suffix = y0 + y1, prefix = z0 + z1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(~0u, suffix, step);
    const float before = __shfl_up_sync(~0u, prefix, step);
    if (lane + step < 32) suffix += later;
    if (lane >= step) prefix += before;
  }
  float later = __shfl_down_sync(~0u, suffix, 1);
  float before = __shfl_up_sync(~0u, prefix, 1);
  if (lane == 31) later = 0.0f;
  if (lane == 0) before = 0.0f;
  float w0 = 0.0f, w1 = 0.0f, state = 0.0f;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) {
    w0 += w[warp][t];
    w1 += w[warp][t + 1];
    state += c[warp];
  }
  state *= decay;
  const std::int64_t at =
      (static_cast<std::int64_t>(chunk.first_token) + t) * a.value_heads + value_head;
  if (t < chunk.rows) a.dg[at] = state + suffix + before + w0;
  if (t + 1 < chunk.rows) a.dg[at + a.value_heads] = state + (y1 + later) + (before + z0) + w1;
}

// Through the norm, if any: d = d - rho^2 (d . x) x; then rounded into the tile that held x.
__device__ __forceinline__ void finish_rows(float (&d)[32], char* tile, const float (&rho)[2],
                                            const float (*dots)[kChunk], bool l2_norm,
                                            const Lane& at, int own_barrier) {
  if (l2_norm) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int row = at.row() + 8 * x;
      const float along = rho[x] * rho[x] * (dots[0][row] + dots[1][row]);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 pair = pair_at(tile, row, n, at.t);
        d[4 * n + 2 * x] -= along * pair.x;
        d[4 * n + 2 * x + 1] -= along * pair.y;
      }
    }
  }
  named_barrier(own_barrier, kWarpgroup);
  store_tile(smem_address(tile), at, d);
}

// Distance of a member of Shared from its start, in units of a descriptor.
#define GDN_TILES(member) static_cast<std::uint32_t>(offsetof(Shared, member) >> 4)

template <int kTiles>
__device__ void compute(const RuleArgs& a, typename Layout<kTiles>::Shared& s) {
  using L = Layout<kTiles>;
  const Lane at;
  const int me = threadIdx.x / kWarpgroup; // math warpgroup, also its half of the key columns
  const int thread = threadIdx.x % kWarpgroup;
  const int warp = threadIdx.x / 32;                      // 0..7
  constexpr std::uint32_t kRowsWord = kTiles * kNextTile; // between the stages of Z, E, dO
  using Shared = typename L::Shared;
  const std::uint32_t base = descriptor(smem_address(&s));
  char* const own_q = s.q + me * kTileBytes;
  char* const own_k = s.k + me * kTileBytes;
  const std::int64_t items = static_cast<std::int64_t>(a.offsets[a.sequences]) * a.key_heads;
  Ring<L::kStages> rows;
  Ring<1> keys, states;
  int buffer = 0;

  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x, keys.advance()) {
    const GdnChunk chunk = a.chunks[item / a.key_heads];
    const int key_head = static_cast<int>(item % a.key_heads);
    barrier_wait(&s.keys_full, keys.parity);
    if (chunk.rows < kChunk) {
      zero_tail(own_q, 1, chunk.rows, thread, kWarpgroup);
      zero_tail(own_k, 1, chunk.rows, thread, kWarpgroup);
      fence_async_proxy();
      named_barrier(kMathBarrier, kMath);
    }

    float raw[32]; // q k^T in warpgroup 0, k k^T in warpgroup 1
    products_begin();
    token_product<kKeyTiles>(raw, base + (me == 0 ? GDN_TILES(q) : GDN_TILES(k)),
                             base + GDN_TILES(k));
    products_commit();
    float dq[32] = {}, dk[32] = {};
    products_wait<0>(raw);

    for (int h = 0; h < a.group; ++h, rows.advance(), states.advance(), buffer ^= 1) {
      const int i = __shfl_sync(~0u, rows.stage, 0); // uniform, for the descriptors' sake
      const int value_head = key_head * a.group + h;
      const auto& factors = s.factors[i];
      const std::uint32_t tiles = kept(base); // or their descriptors are kept, and spilled
      const std::uint32_t rows_at = tiles + i * kRowsWord, half = me * kNextTile;
      barrier_wait(&s.rows_full[i], rows.parity);
      if (chunk.rows < kChunk) { // Z and E are zero there already
        zero_tail(s.d_o[i], kTiles, chunk.rows, threadIdx.x, kMath);
        fence_async_proxy();
        named_barrier(kMathBarrier, kMath);
      }

      // D or F, and H1 behind it
      float mixed[32], h1[32];
      products_begin();
      token_product<kTiles>(mixed, rows_at + (me == 0 ? GDN_TILES(d_o) : GDN_TILES(e)),
                            rows_at + GDN_TILES(z));
      products_commit();
      barrier_wait(&s.states_full, states.parity);
      products_begin();
      state_product<kTiles>(h1, rows_at + GDN_TILES(d_o), tiles + half + GDN_TILES(state));
      products_commit();
      products_wait<1>(mixed);
      named_barrier(kMathBarrier, kMath); // nobody reads the last head's D and F any more
      // The diagonal of E Z^T is dbeta: warp w holds it in column tiles 2w (row g) and 2w + 1.
      const bool holds_diagonal = at.t == at.g / 2;
      if (me == 1) {
        float diagonal[2] = {};
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (n / 2 == at.warp)
            diagonal[n % 2] =
                at.g % 2 == 0 ? mixed[4 * n + 2 * (n % 2)] : mixed[4 * n + 2 * (n % 2) + 1];
        const std::int64_t out =
            (static_cast<std::int64_t>(chunk.first_token) + at.row()) * a.value_heads + value_head;
        if (holds_diagonal && at.row() < chunk.rows) a.dbeta[out] = diagonal[0];
        if (holds_diagonal && at.row() + 8 < chunk.rows)
          a.dbeta[out + 8 * a.value_heads] = diagonal[1];
      }
      {
        float left[2], gamma[2], sums[32];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int row = at.row() + 8 * x;
          gamma[x] = factors[kGamma][row];
          left[x] = me == 0 ? a.scale * factors[kQueryNorm][row]
                            : -factors[kKeyNorm][row] * factors[kBeta][row];
        }
        const int above =
            at.row() - 2 * at.t - me; // of element (n, x, y): above + 8 x - 8 n - y >= 0
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int j = 8 * n + 2 * at.t;
          const float2 gamma_j = *reinterpret_cast<const float2*>(&factors[kGamma][j]);
          const float2 norm = *reinterpret_cast<const float2*>(&factors[kKeyNorm][j]);
          const float2 beta = *reinterpret_cast<const float2*>(&factors[kBeta][j]);
          const float right[2] = {norm.x * beta.x, norm.y * beta.y};
#pragma unroll
          for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int y = 0; y < 2; ++y) {
              const int index = 4 * n + 2 * x + y;
              const float exponent = gamma[x] - (y == 0 ? gamma_j.x : gamma_j.y);
              const float decay = exp2_fast(above >= 8 * n + y - 8 * x ? exponent : -INFINITY);
              mixed[index] *= decay * (left[x] * right[y]);
              sums[index] = mixed[index] * raw[index];
            }
        }
        if (me == 0) { // the diagonal of D carries e^0: no gate gradient
#pragma unroll
          for (int n = 0; n < 8; ++n)
            if (n / 2 == at.warp && holds_diagonal)
              sums[4 * n + 2 * (n % 2) + 0] *= at.g % 2 == 0 ? 0.0f : 1.0f,
                  sums[4 * n + 2 * (n % 2) + 1] *= at.g % 2 == 0 ? 1.0f : 0.0f;
        }
        store_tile(smem_address(me == 0 ? s.d : s.f), at, mixed);
        straddling_sums(s.w[buffer][warp], sums, at);
      }

      // H2 and H3 while H1 is folded in
      products_wait<0>(h1);
      float h2[32], h3[32];
      products_begin();
      state_product<kTiles>(h2, rows_at + GDN_TILES(e), tiles + half + GDN_TILES(state));
      state_product<kTiles>(h3, rows_at + GDN_TILES(z), tiles + half + GDN_TILES(d_state));
      products_commit();
      const int low = at.row(), high = at.row() + 8;
      float y[2] = {}, z_dot[2] = {};
      {
        const float factor[2] = {factors[kQueryDecay][low], factors[kQueryDecay][high]};
        fold_read(dq, y, h1, own_q, factor, at);
      }
      float c = state_dot<kTiles>(s.state, s.d_state, me, thread);
      write_dv<kTiles>(a, s.e[i], factors[kBeta], chunk, value_head, me, thread);
      const float decay = exp2_fast(factors[kGamma][kChunk - 1]);
      const float factor2[2] = {-factors[kWriteDecay][low], -factors[kWriteDecay][high]};
      const float factor3[2] = {factors[kWriteRest][low], factors[kWriteRest][high]};
      products_wait<0>(h2, h3);
      warp_arrive(&s.states_empty);
      warp_arrive(&s.rows_empty[i]);
      fold_write(dk, y, z_dot, h2, h3, own_k, factor2, factor3, at);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        y[x] = quad_sum(y[x]);
        z_dot[x] = quad_sum(z_dot[x]);
        if (at.t == 0) {
          s.y[buffer][me][at.row() + 8 * x] = y[x];
          s.z_dot[buffer][me][at.row() + 8 * x] = z_dot[x];
        }
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) c += __shfl_xor_sync(~0u, c, mask);
      if (at.lane == 0) s.c[buffer][warp] = c;

      fence_async_proxy();
      named_barrier(kMathBarrier, kMath); // D, F and the sums of both warpgroups are there
      pin(dq);
      pin(dk);
      products_begin();
      mix_product<Contract::kAlongRow>(dq, tiles + GDN_TILES(d), tiles + half + GDN_TILES(k));
      mix_product<Contract::kAcrossRows>(dk, tiles + GDN_TILES(d), tiles + half + GDN_TILES(q));
      mix_product<Contract::kAlongRow>(dk, tiles + GDN_TILES(f), tiles + half + GDN_TILES(k));
      mix_product<Contract::kAcrossRows>(dk, tiles + GDN_TILES(f), tiles + half + GDN_TILES(k));
      products_commit();
      if (warp == 0)
        write_dg(a, s.w[buffer], s.y[buffer], s.z_dot[buffer], s.c[buffer], decay, chunk,
                 value_head, at.lane);
      products_wait<0>(dq, dk);
    }

    // Norm and output of dq, dk; rho is that of any value head of the key head.
    const float* rho =
        a.factors +
        ((item / a.key_heads) * a.value_heads + key_head * a.group) * kFactors * kChunk + at.row();
    const float rho_q[2] = {rho[kQueryNorm * kChunk], rho[kQueryNorm * kChunk + 8]};
    const float rho_k[2] = {rho[kKeyNorm * kChunk], rho[kKeyNorm * kChunk + 8]};
    if (a.l2_norm) {
      float dot_q[2] = {}, dot_k[2] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float2 q = pair_at(own_q, at.row() + 8 * x, n, at.t);
          const float2 k = pair_at(own_k, at.row() + 8 * x, n, at.t);
          dot_q[x] += dq[4 * n + 2 * x] * q.x + dq[4 * n + 2 * x + 1] * q.y;
          dot_k[x] += dk[4 * n + 2 * x] * k.x + dk[4 * n + 2 * x + 1] * k.y;
        }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        dot_q[x] = quad_sum(dot_q[x]);
        dot_k[x] = quad_sum(dot_k[x]);
        if (at.t == 0) {
          s.norm_dot[0][me][at.row() + 8 * x] = dot_q[x];
          s.norm_dot[1][me][at.row() + 8 * x] = dot_k[x];
        }
      }
      named_barrier(kMathBarrier, kMath);
    }
    finish_rows(dq, own_q, rho_q, s.norm_dot[0], a.l2_norm, at, kOwnBarrier + me);
    finish_rows(dk, own_k, rho_k, s.norm_dot[1], a.l2_norm, at, kOwnBarrier + me);
    named_barrier(kOwnBarrier + me, kWarpgroup);
    const std::int64_t first =
        (static_cast<std::int64_t>(chunk.first_token) * a.key_heads + key_head) * a.key_dim +
        64 * me;
    const std::int64_t stride = static_cast<std::int64_t>(a.key_heads) * a.key_dim;
    write_rows(a.dq + first, stride, own_q, chunk.rows, a.key_dim - 64 * me);
    write_rows(a.dk + first, stride, own_k, chunk.rows, a.key_dim - 64 * me);
    fence_async_proxy();
    warp_arrive(&s.keys_empty);
  }
}

#undef GDN_TILES

// Rows past the last sequence.
__device__ void zero_padding(const RuleArgs& a) {
  const std::int64_t first = a.offsets[a.sequences], last = a.offsets[a.sequences + 1];
  for (std::int64_t c = first + blockIdx.x; c < last; c += gridDim.x) {
    const GdnChunk chunk = a.chunks[c];
    auto zero = [&](void* out, std::int64_t bytes_per_token, int unit) {
      const std::int64_t begin = chunk.first_token * bytes_per_token / unit;
      const std::int64_t count = chunk.rows * bytes_per_token / unit;
      for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x)
        if (unit == 16)
          static_cast<uint4*>(out)[begin + i] = uint4{0, 0, 0, 0};
        else
          static_cast<float*>(out)[begin + i] = 0.0f;
    };
    zero(a.dq, std::int64_t{2} * a.key_heads * a.key_dim, 16);
    zero(a.dk, std::int64_t{2} * a.key_heads * a.key_dim, 16);
    zero(a.dv, std::int64_t{2} * a.value_heads * a.value_dim, 16);
    zero(a.dg, std::int64_t{4} * a.value_heads, 4);
    zero(a.dbeta, std::int64_t{4} * a.value_heads, 4);
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_gradients_kernel(const __grid_constant__ RuleArgs a) {
  using L = Layout<kTiles>;
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<typename L::Shared*>(raw);
  if (threadIdx.x == 0) {
    barrier_init(&s.keys_full, 1);
    barrier_init(&s.states_full, 1);
    barrier_init(&s.keys_empty, kMath / 32 * kWarpArrivals);
    barrier_init(&s.states_empty, kMath / 32 * kWarpArrivals);
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(&s.rows_full[i], 1);
      barrier_init(&s.rows_empty[i], kMath / 32 * kWarpArrivals);
    }
    barrier_init_fence();
  }
  zero_padding(a);
  __syncthreads();
  if (threadIdx.x >= kMath) {
    give_registers<24>();
    if (threadIdx.x == kMath) feed<kTiles>(a, s);
  } else {
    take_registers<240>();
    compute<kTiles>(a, s);
  }
}

template <int kTiles>
void launch(const RuleArgs& args, const LaunchContext& context) {
  const auto kernel = gdn_gradients_kernel<kTiles>;
  constexpr int kBytes = sizeof(typename Layout<kTiles>::Shared);
  static_assert(kBytes <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(context.sm_count), kThreads, kBytes, context.stream>>>(args);
  check_launch("gdn_gradients_kernel");
}

} // namespace

void launch_gradients(const RuleArgs& args, const LaunchContext& context) {
  switch (args.value_tiles) {
  case 1: return launch<1>(args, context);
  case 2: return launch<2>(args, context);
  case 3: return launch<3>(args, context);
  }
}

} // namespace gdn::kernels
