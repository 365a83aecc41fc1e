// The reverse scan: as the state scan (scan_sm90.cu), from the last chunk of a sequence to the first,
// carrying the gradient of the state, transposed, in registers. Per chunk, with D = dS behind it:
//   dU = P^T dO + (rho e^(gamma_last-gamma)) K D        E = dU - N^T (beta dU)
//   D <- e^gamma_last D + (s rho e^gamma Q)^T dO - (rho e^gamma K)^T (beta E)
// Hands D and E of every chunk to the gradient kernel.
#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

template <int kGroups>
struct Layout {
  static constexpr int kTiles = 6 + kGroups; // K, Q, N, P, dO
  static constexpr int kStages = kGroups == 2 ? 2 : 3;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  struct Shared {
    char k[kStages][kKeyTiles * kTileBytes];
    char q[kStages][kKeyTiles * kTileBytes];
    char n[kStages][kTileBytes];
    char p[kStages][kTileBytes];
    char d_o[kStages][kGroups][kTileBytes]; // then E on its way out
    char state[kGroups][kStateBytes];
    float factors[kStages][5][kChunk];
    std::uint64_t full[kStages], empty[kStages];
  };
};

template <int kGroups>
__device__ void feed(const RuleArgs& a, typename Layout<kGroups>::Shared& s, const ScanItem& item) {
  using L = Layout<kGroups>;
  Ring<L::kStages> ring;
  const int key_head = item.head / a.group;
  for (int c = item.chunks - 1; c >= 0; --c, ring.advance()) {
    const int i = ring.stage;
    barrier_wait(&s.empty[i], ring.parity ^ 1);
    barrier_expect(&s.full[i], L::kTiles * kTileBytes + kScanFactorBytes);
    const int token = static_cast<int>(item.first_token) + c * kChunk;
    const std::int64_t head = static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads +
                              item.head;
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(s.k[i] + half * kTileBytes, &a.k, &s.full[i], 64 * half, key_head, token);
    for (int w = 0; w < kGroups; ++w)
      load_box(s.d_o[i][w], &a.d_o, &s.full[i], 64 * (item.first_tile + w), item.head, token);
    load_bulk(s.p[i], a.p + head * kTileBytes, kTileBytes, &s.full[i]);
    load_bulk(s.factors[i], a.factors + head * kFactors * kChunk, kScanFactorBytes, &s.full[i]);
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(s.q[i] + half * kTileBytes, &a.q, &s.full[i], 64 * half, key_head, token);
    load_box(s.n[i], &a.n, &s.full[i], 0, item.head, token);
  }
}

// state (64 values x 128 keys) += operand (64 x 64 tokens) times a key-width token tile.
__device__ __forceinline__ void add_to_state(float (&state)[64], const std::uint32_t (&operand)[16],
                                             const char* tokens) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    product<Contract::kAcrossRows>(state, &operand[4 * k],
                                   tile_step<Contract::kAcrossRows>(smem_address(tokens), k));
}

template <int kGroups>
__device__ void compute(const RuleArgs& a, typename Layout<kGroups>::Shared& s, const ScanItem& item) {
  using L = Layout<kGroups>;
  const Lane at;
  const int me = threadIdx.x / kWarpgroup;
  const int tile = item.first_tile + me;
  const int own_barrier = 2 + me;
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const std::int64_t state_at =
      (static_cast<std::int64_t>(item.sequence) * a.value_heads + item.head) * a.key_dim *
      a.value_dim;

  float state[64]; // gradient of the state, transposed
  read_state(state, a.state_in == nullptr ? nullptr : a.state_in + state_at, a.key_dim,
             a.value_dim, 64 * tile, at);

  Ring<L::kStages> ring;
  int previous = -1;
  for (int c = item.chunks - 1; c >= 0; --c, ring.advance()) {
    const int i = ring.stage;
    const int rows = c == item.chunks - 1 ? item.last_rows : kChunk;
    barrier_wait(&s.full[i], ring.parity);
    if (rows < kChunk) {
      zero_tail(s.k[i], kKeyTiles, rows, threadIdx.x, kGroups * kWarpgroup);
      zero_tail(s.q[i], kKeyTiles, rows, threadIdx.x, kGroups * kWarpgroup);
      fence_async_proxy();
      named_barrier(1, kGroups * kWarpgroup);
    }

    std::uint32_t operand[32];
    pack_operand(state, operand);
    float w[32];
    products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      product<Contract::kAlongRow>(
          w, &operand[4 * k],
          tile_step<Contract::kAlongRow>(smem_address(s.k[i]) + (k / 4) * kTileBytes, k % 4), k > 0);
    products_commit();

    // dO, transposed: the operand of P^T dO, and scaled that of the state update
    std::uint32_t d_o[16], read[16];
    load_tile_transposed(smem_address(s.d_o[i][me]), at, d_o);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * at.t;
      const float2 decay = *reinterpret_cast<const float2*>(&s.factors[i][kQueryDecay][j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t& pair = d_o[2 * n + h];
        if (j >= rows) pair &= 0xffff0000u; // what lies behind the sequence may be anything
        if (j + 1 >= rows) pair &= 0x0000ffffu;
        read[2 * n + h] = pack_bf16(decay.x * bf16_low(pair), decay.y * bf16_high(pair));
      }
    }
    float e[32];
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(e, &d_o[4 * k],
                                     tile_step<Contract::kAcrossRows>(smem_address(s.p[i]), k),
                                     k > 0);
    products_commit();

    if (leader) store_wait_read<0>();
    named_barrier(own_barrier, kWarpgroup); // the images before have left shared memory
    if (previous >= 0 && at.lane == 0) barrier_arrive(&s.empty[previous]);
    store_state(smem_address(s.state[me]), at, operand);

    products_wait<1>(w, operand);
    const float decay = exp2_fast(s.factors[i][kGamma][kChunk - 1]);
#pragma unroll
    for (int x = 0; x < 64; ++x) state[x] *= decay;
    pin(state);
    products_begin();
    add_to_state(state, read, s.q[i]);
    products_commit();

    products_wait<1>(e, d_o); // dU = P^T dO + K D, then E = dU - N^T (beta dU)
    std::uint32_t scaled[16];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * at.t;
      const float2 rest = *reinterpret_cast<const float2*>(&s.factors[i][kKeyRest][j]);
      const float2 beta = *reinterpret_cast<const float2*>(&s.factors[i][kBeta][j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& e0 = e[4 * n + 2 * h];
        float& e1 = e[4 * n + 2 * h + 1];
        e0 += rest.x * w[4 * n + 2 * h];
        e1 += rest.y * w[4 * n + 2 * h + 1];
        scaled[2 * n + h] = pack_bf16(-beta.x * e0, -beta.y * e1);
      }
    }
    pin(e);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(e, &scaled[4 * k],
                                     tile_step<Contract::kAcrossRows>(smem_address(s.n[i]), k));
    products_commit();
    products_wait<0>(e, scaled, state, read);

#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * at.t;
      const float2 decayed = *reinterpret_cast<const float2*>(&s.factors[i][kKeyDecay][j]);
      const float2 beta = *reinterpret_cast<const float2*>(&s.factors[i][kBeta][j]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        scaled[2 * n + h] = pack_bf16(-decayed.x * beta.x * e[4 * n + 2 * h],
                                      -decayed.y * beta.y * e[4 * n + 2 * h + 1]);
    }
    products_begin();
    add_to_state(state, scaled, s.k[i]);
    products_commit();

    std::uint32_t rounded[16];
    pack_operand(e, rounded);
    store_tile_transposed(smem_address(s.d_o[i][me]), at, rounded);
    fence_async_proxy();
    named_barrier(own_barrier, kWarpgroup);
    if (leader) {
      const std::int64_t image =
          (static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads + item.head) *
              a.value_tiles + tile;
      store_bulk(a.d_states + image * kStateBytes, s.state[me], kStateBytes);
      store_bulk(a.e + image * kTileBytes, s.d_o[i][me], kTileBytes);
      store_commit();
    }
    products_wait<0>(state, scaled);
    previous = i;
  }

  if (a.state_out != nullptr)
    write_state(state, a.state_out + state_at, a.key_dim, a.value_dim, 64 * tile, at);
  if (leader) store_wait<0>();
}

template <int kGroups>
__global__ void __launch_bounds__(Layout<kGroups>::kThreads, 1)
gdn_reverse_scan_kernel(const __grid_constant__ RuleArgs a) {
  using L = Layout<kGroups>;
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
    if (threadIdx.x == kGroups * kWarpgroup) feed<kGroups>(a, s, item);
  } else {
    if constexpr (kGroups == 2) take_registers<240>();
    compute<kGroups>(a, s, item);
  }
}

template <int kGroups>
void launch(const RuleArgs& args, const LaunchContext& context) {
  using L = Layout<kGroups>;
  const auto kernel = gdn_reverse_scan_kernel<kGroups>;
  constexpr int kBytes = sizeof(typename L::Shared);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto ctas =
      static_cast<unsigned>(args.sequences * args.value_heads * (args.value_tiles / kGroups));
  kernel<<<ctas, L::kThreads, kBytes, context.stream>>>(args);
  check_launch("gdn_reverse_scan_kernel");
}

} // namespace

void launch_reverse_scan(const RuleArgs& args, const LaunchContext& context) {
  if (args.sequences == 0) return;
  const bool pairs = args.value_tiles % 2 == 0 &&
                     args.sequences * args.value_heads >= context.sm_count;
  pairs ? launch<2>(args, context) : launch<1>(args, context);
}

} // namespace gdn::kernels
