// The state scan: one CTA walks the chunks of one (sequence, value head). Every math warpgroup owns 64
// value columns and keeps their state transposed (values x keys) in fp32 registers, so each product's
// A operand is a rounded accumulator of the one before and nothing but inputs passes through shared
// memory. One more warpgroup feeds the ring of input tiles.
//
//   forward   W = S K^T;  R = V^T - W (rho e^gamma);  Z = R - (R beta) N^T;  U = Z beta
//             O = (S Q^T)(s rho e^gamma) + U P^T;     S = e^gamma_last S + (U rho e^(gamma_last-gamma)) K
//   rebuild   the same without O: hands S (before the chunk) and Z of every chunk to the backward
#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

enum class Scan { kForward, kRebuild };

template <Scan kScan, int kGroups> // kGroups: math warpgroups
struct Layout {
  static constexpr bool kForward = kScan == Scan::kForward, kRebuild = !kForward;
  static constexpr int kTiles = (kForward ? 6 : 3) + kGroups; // K, [Q, P,] N, V
  static constexpr int kStages = kForward ? 3 : 4;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  struct Shared {
    char k[kStages][kKeyTiles * kTileBytes];
    char n[kStages][kTileBytes];
    char v[kStages][kGroups][kTileBytes]; // then O or Z on its way out
    char q[kForward ? kStages : 0][kKeyTiles * kTileBytes];
    char p[kForward ? kStages : 0][kTileBytes];
    char state[kForward ? 0 : kGroups][kStateBytes];
    float factors[kStages][5][kChunk];
    std::uint64_t full[kStages], empty[kStages];
  };
};

template <Scan kScan, int kGroups>
__device__ void feed(const RuleArgs& a, typename Layout<kScan, kGroups>::Shared& s,
                     const ScanItem& item) {
  using L = Layout<kScan, kGroups>;
  Ring<L::kStages> ring;
  const int key_head = item.head / a.group;
  for (int c = 0; c < item.chunks; ++c, ring.advance()) {
    const int i = ring.stage;
    barrier_wait(&s.empty[i], ring.parity ^ 1);
    barrier_expect(&s.full[i], L::kTiles * kTileBytes + kScanFactorBytes);
    const int token = static_cast<int>(item.first_token) + c * kChunk;
    const std::int64_t head = static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads +
                              item.head;
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(s.k[i] + half * kTileBytes, &a.k, &s.full[i], 64 * half, key_head, token);
    load_bulk(s.factors[i], a.factors + head * kFactors * kChunk, kScanFactorBytes, &s.full[i]);
    for (int w = 0; w < kGroups; ++w)
      load_box(s.v[i][w], &a.v, &s.full[i], 64 * (item.first_tile + w), item.head, token);
    load_box(s.n[i], &a.n, &s.full[i], 0, item.head, token);
    if constexpr (L::kForward) {
      for (int half = 0; half < kKeyTiles; ++half)
        load_box(s.q[i] + half * kTileBytes, &a.q, &s.full[i], 64 * half, key_head, token);
      load_bulk(s.p[i], a.p + head * kTileBytes, kTileBytes, &s.full[i]);
    }
  }
}

// d (64 values x 64 tokens) = state (64 x 128 keys) times a key-width token tile, transposed.
__device__ __forceinline__ void state_product(float (&d)[32], const std::uint32_t (&state)[32],
                                              const char* tokens) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
    product<Contract::kAlongRow>(
        d, &state[4 * k],
        tile_step<Contract::kAlongRow>(smem_address(tokens) + (k / 4) * kTileBytes, k % 4), k > 0);
}

template <Scan kScan, int kGroups>
__device__ void compute(const RuleArgs& a, typename Layout<kScan, kGroups>::Shared& s,
                        const ScanItem& item) {
  using L = Layout<kScan, kGroups>;
  const Lane at;
  const int me = threadIdx.x / kWarpgroup; // math warpgroup
  const int tile = item.first_tile + me;
  const int own_barrier = 2 + me;
  const std::int64_t state_at =
      (static_cast<std::int64_t>(item.sequence) * a.value_heads + item.head) * a.key_dim *
      a.value_dim;

  float state[64];
  read_state(state, a.state_in == nullptr ? nullptr : a.state_in + state_at, a.key_dim,
             a.value_dim, 64 * tile, at);

  // The output of a chunk is completed one chunk later, in the shadow of the next chunk's chain.
  float o[32] = {};          // read of the state, scaled; lacks U P^T
  std::uint32_t u[16] = {};  // U, rounded
  Ring<L::kStages> ring;
  int previous = 0; // stage of the chunk before

  auto complete_output = [&](int stage) { // o += U P^T
    pin(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAlongRow>(o, &u[4 * k],
                                   tile_step<Contract::kAlongRow>(smem_address(s.p[stage]), k));
    products_commit();
  };
  // Writes the output of chunk c through its value tile, then frees its stage.
  auto write_output = [&](int c, int stage, const std::uint32_t (&rounded)[16]) {
    char* out = s.v[stage][me];
    store_tile_transposed(smem_address(out), at, rounded);
    named_barrier(own_barrier, kWarpgroup);
    const std::int64_t token = item.first_token + static_cast<std::int64_t>(c) * kChunk;
    write_rows(a.o + (token * a.value_heads + item.head) * a.value_dim + 64 * tile,
               static_cast<std::int64_t>(a.value_heads) * a.value_dim, out,
               c == item.chunks - 1 ? item.last_rows : kChunk, a.value_dim - 64 * tile);
    fence_async_proxy();
    __syncwarp();
    if (at.lane == 0) barrier_arrive(&s.empty[stage]);
  };

  for (int c = 0; c < item.chunks; ++c, ring.advance()) {
    const int i = ring.stage;
    const int rows = c == item.chunks - 1 ? item.last_rows : kChunk;
    barrier_wait(&s.full[i], ring.parity);
    if (rows < kChunk) {
      zero_tail(s.k[i], kKeyTiles, rows, threadIdx.x, kGroups * kWarpgroup);
      fence_async_proxy();
      named_barrier(1, kGroups * kWarpgroup);
    }

    std::uint32_t operand[32]; // the state, rounded
    pack_operand(state, operand);
    float w[32];
    products_begin();
    state_product(w, operand, s.k[i]);
    products_commit();
    if constexpr (L::kForward) complete_output(previous);

    if constexpr (L::kRebuild) {
      if (threadIdx.x % kWarpgroup == 0) store_wait_read<0>();
      named_barrier(own_barrier, kWarpgroup); // the last chunk's images have left shared memory
      if (c > 0 && at.lane == 0) barrier_arrive(&s.empty[previous]);
      store_state(smem_address(s.state[me]), at, operand);
    }

    // R = V - K S, elementwise in the transposed layout
    std::uint32_t v[16];
    load_tile_transposed(smem_address(s.v[i][me]), at, v);
    float z[32];
    std::uint32_t r[16];
    if constexpr (L::kForward)
      products_wait<1>(w);
    else
      products_wait<0>(w, operand);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * at.t;
      const float2 decay = *reinterpret_cast<const float2*>(&s.factors[i][kKeyDecay][j]);
      const float2 beta = *reinterpret_cast<const float2*>(&s.factors[i][kBeta][j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v0 = bf16_low(v[2 * n + h]), v1 = bf16_high(v[2 * n + h]);
        if (j >= rows) v0 = 0.0f; // what lies behind the sequence may be anything
        if (j + 1 >= rows) v1 = 0.0f;
        z[4 * n + 2 * h] = v0 - decay.x * w[4 * n + 2 * h];
        z[4 * n + 2 * h + 1] = v1 - decay.y * w[4 * n + 2 * h + 1];
        r[2 * n + h] = pack_bf16(-beta.x * z[4 * n + 2 * h], -beta.y * z[4 * n + 2 * h + 1]);
      }
    }

    // Z = R - N (beta R)
    pin(z);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAlongRow>(z, &r[4 * k],
                                   tile_step<Contract::kAlongRow>(smem_address(s.n[i]), k));
    products_commit();
    std::uint32_t rounded[16]; // the output of the chunk before
    if constexpr (L::kForward) {
      products_wait<1>(o, u);
      pack_operand(o, rounded);
      products_begin();
      state_product(o, operand, s.q[i]);
      products_commit();
    }
    const float decay = exp2_fast(s.factors[i][kGamma][kChunk - 1]);
#pragma unroll
    for (int e = 0; e < 64; ++e) state[e] *= decay;
    if constexpr (L::kForward)
      products_wait<1>(z, r);
    else
      products_wait<0>(z, r);

    std::uint32_t written[16]; // U scaled for the state
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * at.t;
      const float2 beta = *reinterpret_cast<const float2*>(&s.factors[i][kBeta][j]);
      const float2 rest = *reinterpret_cast<const float2*>(&s.factors[i][kKeyRest][j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& z0 = z[4 * n + 2 * h];
        float& z1 = z[4 * n + 2 * h + 1];
        if (j >= rows) z0 = 0.0f; // N holds other rows there
        if (j + 1 >= rows) z1 = 0.0f;
        const float u0 = beta.x * z0, u1 = beta.y * z1;
        written[2 * n + h] = pack_bf16(rest.x * u0, rest.y * u1);
        if constexpr (L::kForward) u[2 * n + h] = pack_bf16(u0, u1);
      }
    }

    pin(state);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(state, &written[4 * k],
                                     tile_step<Contract::kAcrossRows>(smem_address(s.k[i]), k));
    products_commit();

    if constexpr (L::kForward) {
      if (c > 0) write_output(c - 1, previous, rounded);
      products_wait<0>(state, written, o, operand);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 read =
            *reinterpret_cast<const float2*>(&s.factors[i][kQueryDecay][8 * n + 2 * at.t]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          o[4 * n + 2 * h] *= read.x;
          o[4 * n + 2 * h + 1] *= read.y;
        }
      }
    } else {
      pack_operand(z, rounded);
      store_tile_transposed(smem_address(s.v[i][me]), at, rounded);
      fence_async_proxy();
      named_barrier(own_barrier, kWarpgroup);
      if (threadIdx.x % kWarpgroup == 0) {
        const std::int64_t image =
            (static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads + item.head) *
                a.value_tiles + tile;
        store_bulk(a.states + image * kStateBytes, s.state[me], kStateBytes);
        store_bulk(a.z + image * kTileBytes, s.v[i][me], kTileBytes);
        store_commit();
      }
      products_wait<0>(state, written);
    }
    previous = i;
  }

  if constexpr (L::kForward) {
    if (item.chunks > 0) {
      complete_output(previous);
      products_wait<0>(o, u);
      std::uint32_t rounded[16];
      pack_operand(o, rounded);
      write_output(item.chunks - 1, previous, rounded);
    }
    if (a.state_out != nullptr)
      write_state(state, a.state_out + state_at, a.key_dim, a.value_dim, 64 * tile, at);
  } else {
    if (threadIdx.x % kWarpgroup == 0) store_wait<0>();
  }
}

template <Scan kScan, int kGroups>
__global__ void __launch_bounds__((Layout<kScan, kGroups>::kThreads), 1)
gdn_scan_kernel(const __grid_constant__ RuleArgs a) {
  using L = Layout<kScan, kGroups>;
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<typename L::Shared*>(raw);
  const ScanItem item = make_scan_item(a, kGroups);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * kWarpgroup) {
    if constexpr (kGroups == 2) give_registers<24>();
    if (threadIdx.x == kGroups * kWarpgroup) feed<kScan, kGroups>(a, s, item);
  } else {
    if constexpr (kGroups == 2) take_registers<240>();
    compute<kScan, kGroups>(a, s, item);
  }
}

template <Scan kScan, int kGroups>
void launch(const RuleArgs& args, const LaunchContext& context) {
  using L = Layout<kScan, kGroups>;
  const auto kernel = gdn_scan_kernel<kScan, kGroups>;
  constexpr int kBytes = sizeof(typename L::Shared);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto ctas =
      static_cast<unsigned>(args.sequences * args.value_heads * (args.value_tiles / kGroups));
  kernel<<<ctas, L::kThreads, kBytes, context.stream>>>(args);
  check_launch("gdn_scan_kernel");
}

template <Scan kScan>
void launch(const RuleArgs& args, const LaunchContext& context) {
  if (args.sequences == 0) return;
  // Two slices a CTA share the loads of q, k, N, P; worth it once every SM has a CTA without that.
  const bool pairs = args.value_tiles % 2 == 0 &&
                     args.sequences * args.value_heads >= context.sm_count;
  pairs ? launch<kScan, 2>(args, context) : launch<kScan, 1>(args, context);
}

} // namespace

void launch_forward_scan(const RuleArgs& args, const LaunchContext& context) {
  launch<Scan::kForward>(args, context);
}

void launch_rebuild_scan(const RuleArgs& args, const LaunchContext& context) {
  launch<Scan::kRebuild>(args, context);
}

} // namespace gdn::kernels
