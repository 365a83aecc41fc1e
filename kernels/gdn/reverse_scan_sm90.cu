// The reverse scan: as the state scan (scan_sm90.cu), from the last chunk of a sequence to the
// first, carrying the gradient of the state, transposed, in registers. Per chunk, with D = dS
// behind it:
//   dU = P^T dO + (rho e^(gamma_last-gamma)) K D        E = dU - N^T (beta dU)
//   D <- e^gamma_last D + (s rho e^gamma Q)^T dO - (rho e^gamma K)^T (beta E)
// Hands D and E of every chunk to the gradient kernel.
#include <cstddef>

#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

template <int kGroups>
struct Layout {
  static constexpr int kTiles = 6 + kGroups; // K, Q, dO, N, P
  static constexpr int kStages = kGroups == 2 ? 2 : 3;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Tiles of a stage. dO is the way out of E.
  static constexpr int kK = 0, kQ = 2, kDo = 4, kN = kDo + kGroups, kP = kN + 1;
  struct Shared {
    char tiles[kStages][kTiles][kTileBytes];
    char state[kGroups][2][kStateBytes]; // images on their way out
    float factors[kStages][kReverseFactors][kChunk];
    std::uint64_t full[kStages], empty[kStages]; // of the ring's stages
    std::uint64_t result_full[kStages][kGroups]; // a stage holds a chunk's E
    std::uint64_t state_empty[kGroups][2];       // a state image has left shared memory
  };
};

template <int kGroups>
__device__ void feed(const RuleArgs& a, typename Layout<kGroups>::Shared& s, const ScanItem& item) {
  using L = Layout<kGroups>;
  Ring<L::kStages> ring;
  const int key_head = item.head / a.group;
  for (int c = item.chunks - 1; c >= 0; --c, ring.advance()) {
    const int i = ring.stage;
    char(*tiles)[kTileBytes] = s.tiles[i];
    std::uint64_t* full = &s.full[i];
    barrier_wait(&s.empty[i], ring.parity ^ 1);
    barrier_expect(full, L::kTiles * kTileBytes + kReverseFactors * kChunk * 4);
    const int token = static_cast<int>(item.first_token) + c * kChunk;
    const std::int64_t head =
        static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads + item.head;
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(tiles[L::kK + half], &a.k, full, 64 * half, key_head, token);
    for (int w = 0; w < kGroups; ++w)
      load_box(tiles[L::kDo + w], &a.d_o, full, 64 * (item.first_tile + w), item.head, token);
    load_bulk(tiles[L::kP], a.p + head * kTileBytes, kTileBytes, full);
    load_bulk(s.factors[i], a.factors + head * kFactors * kChunk, kReverseFactors * kChunk * 4,
              full);
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(tiles[L::kQ + half], &a.q, full, 64 * half, key_head, token);
    load_box(tiles[L::kN], &a.n, full, 0, item.head, token);
  }
}

// state (64 values x 128 keys) += operand (64 x 64 tokens) times the token tiles at `tokens`.
__device__ __forceinline__ void add_to_state(float (&state)[64], const std::uint32_t (&operand)[16],
                                             std::uint32_t tokens) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    product<Contract::kAcrossRows>(state, &operand[4 * k],
                                   tokens + step_offset<Contract::kAcrossRows>(k));
}

// One warp: takes the results of math warpgroup `me` from shared memory, then frees the stage.
template <int kGroups>
__device__ void write(const RuleArgs& a, typename Layout<kGroups>::Shared& s,
                      const ScanItem& item) {
  using L = Layout<kGroups>;
  if (threadIdx.x % 32 != 0) return;
  const int me = threadIdx.x / 32 - 4 * kGroups - 1;
  Ring<L::kStages> ring;
  for (int done = 0; done < item.chunks; ++done, ring.advance()) {
    const int i = ring.stage;
    const std::int64_t image =
        (static_cast<std::int64_t>(item.first_chunk + item.chunks - 1 - done) * a.value_heads +
         item.head) *
            a.value_tiles +
        item.first_tile + me;
    barrier_wait(&s.result_full[i][me], ring.parity);
    store_bulk(a.d_states + image * kStateBytes, s.state[me][done & 1], kStateBytes);
    store_bulk(a.e + image * kTileBytes, s.tiles[i][L::kDo + me], kTileBytes);
    store_commit();
    store_wait_read<0>();
    barrier_arrive(&s.empty[i]);
    barrier_arrive(&s.state_empty[me][done & 1]);
  }
  store_wait<0>();
}

template <int kGroups>
__device__ void compute(const RuleArgs& a, typename Layout<kGroups>::Shared& s,
                        const ScanItem& item) {
  using L = Layout<kGroups>;
  using Shared = typename L::Shared;
  constexpr std::uint32_t kStageWord = L::kTiles * kNextTile;
  const Lane at;
  const int me = threadIdx.x / kWarpgroup;
  const int tile = item.first_tile + me;
  const std::uint32_t base = kept(smem_address(&s));
  const std::int64_t state_at =
      (static_cast<std::int64_t>(item.sequence) * a.value_heads + item.head) * a.key_dim *
      a.value_dim;
  const std::uint32_t tiles = descriptor(smem_address(s.tiles));

  float state[64]; // gradient of the state, transposed
  read_state(state, a.state_in == nullptr ? nullptr : a.state_in + state_at, a.key_dim, a.value_dim,
             64 * tile, at);

  Ring<L::kStages> ring;
  if (item.chunks > 0) barrier_wait(&s.full[0], 0);
  for (int done = 0; done < item.chunks; ++done) {
    const int i = __shfl_sync(~0u, ring.stage, 0); // uniform, for the descriptors' sake
    const std::uint32_t stage = tiles + i * kStageWord;
    const std::uint32_t own_tile = base + static_cast<std::uint32_t>(offsetof(Shared, tiles)) +
                                   (i * L::kTiles + L::kDo + me) * kTileBytes; // dO, later E
    const std::uint32_t factors = base + static_cast<std::uint32_t>(offsetof(Shared, factors)) +
                                  i * kReverseFactors * kChunk * 4 + 8 * at.t;
    auto factor = [&](int which, int n) {
      return load_shared_pair(factors + (which * kChunk + 8 * n) * 4);
    };
    if (done == 0 && item.last_rows < kChunk) {
      // what lies behind the sequence may be anything: K, Q and the dO slices
      zero_tail(s.tiles[i][0], 4 + kGroups, item.last_rows, threadIdx.x, kGroups * kWarpgroup);
      fence_async_proxy();
      named_barrier(1, kGroups * kWarpgroup);
    }

    // dO, transposed: the operand of P^T dO, and scaled that of the state update
    std::uint32_t d_o[16], read[16], operand[32];
    load_tile_transposed(own_tile, at, d_o);
    float2 reads[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) reads[n] = factor(kQueryDecay, n);
    pack_operand(state, operand);
    float w[32];
    products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      product<Contract::kAlongRow>(
          w, &operand[4 * k],
          stage + (L::kK + k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4), k > 0);
    products_commit();

    float e[32];
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(
          e, &d_o[4 * k], stage + L::kP * kNextTile + step_offset<Contract::kAcrossRows>(k), k > 0);
    products_commit();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t pair = d_o[2 * n + h];
        read[2 * n + h] = pack_bf16(reads[n].x * bf16_low(pair), reads[n].y * bf16_high(pair));
      }

    barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, state_empty)) +
                     (2 * me + (done & 1)) * 8,
                 (done / 2 & 1) ^ 1);
    store_state(base + static_cast<std::uint32_t>(offsetof(Shared, state)) +
                    (2 * me + (done & 1)) * kStateBytes,
                at, operand);

    const float last =
        exp2_fast(load_shared(factors - 8 * at.t + (kGamma * kChunk + kChunk - 1) * 4));
    float2 rest[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) rest[n] = factor(kKeyRest, n);
    products_wait<1>(w, operand);
#pragma unroll
    for (int x = 0; x < 64; ++x) state[x] *= last;
    pin(state);
    products_begin();
    add_to_state(state, read, stage + L::kQ * kNextTile);
    products_commit();

    float2 betas[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) betas[n] = factor(kBeta, n);
    products_wait<1>(e, d_o); // dU = P^T dO + K D, then E = dU - N^T (beta dU)
    std::uint32_t scaled[16];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& e0 = e[4 * n + 2 * h];
        float& e1 = e[4 * n + 2 * h + 1];
        e0 += rest[n].x * w[4 * n + 2 * h];
        e1 += rest[n].y * w[4 * n + 2 * h + 1];
        scaled[2 * n + h] = pack_bf16(-betas[n].x * e0, -betas[n].y * e1);
      }
    pin(e);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(
          e, &scaled[4 * k], stage + L::kN * kNextTile + step_offset<Contract::kAcrossRows>(k));
    products_commit();
    float2 decayed[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) decayed[n] = factor(kWriteDecay, n);
    products_wait<0>(e, scaled, state, read);

#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        scaled[2 * n + h] =
            pack_bf16(-decayed[n].x * e[4 * n + 2 * h], -decayed[n].y * e[4 * n + 2 * h + 1]);
    products_begin();
    add_to_state(state, scaled, stage + L::kK * kNextTile);
    products_commit();

    // In the shadow of the state update
    std::uint32_t rounded[16];
    pack_operand(e, rounded);
    store_tile_transposed(own_tile, at, rounded);
    fence_async_proxy();
    ring.advance();
    if (done + 1 < item.chunks)
      barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, full)) + 8 * ring.stage,
                   ring.parity);
    products_wait<0>(state, scaled); // the stage is free but for its results
    warp_arrive(base + static_cast<std::uint32_t>(offsetof(Shared, result_full)) +
                8 * (i * kGroups + me));
  }

  if (a.state_out != nullptr)
    write_state(state, a.state_out + state_at, a.key_dim, a.value_dim, 64 * tile, at);
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
      barrier_init(&s.empty[i], kGroups);
      for (int w = 0; w < kGroups; ++w) barrier_init(&s.result_full[i][w], 4 * kWarpArrivals);
    }
    for (int w = 0; w < kGroups; ++w) {
      barrier_init(&s.state_empty[w][0], 1);
      barrier_init(&s.state_empty[w][1], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const ScanRole role = scan_role<kGroups>();
  if (role != ScanRole::kMath) {
    if constexpr (kGroups == 2) give_registers<40>();
    if (role == ScanRole::kLoad && threadIdx.x % 32 == 0) feed<kGroups>(a, s, item);
    if (role == ScanRole::kWrite) write<kGroups>(a, s, item);
  } else {
    if constexpr (kGroups == 2) take_registers<232>();
    compute<kGroups>(a, s, item);
  }
}

template <int kGroups>
void launch(const RuleArgs& args, const LaunchContext& context) {
  using L = Layout<kGroups>;
  const auto kernel = gdn_reverse_scan_kernel<kGroups>;
  constexpr int kBytes = sizeof(typename L::Shared);
  static_assert(kBytes <= kMaxSharedBytes);
  GDN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto ctas =
      static_cast<unsigned>(args.sequences * args.value_heads * (args.value_tiles / kGroups));
  kernel<<<ctas, L::kThreads, kBytes, context.stream>>>(args);
  check_launch("gdn_reverse_scan_kernel");
}

} // namespace

void launch_reverse_scan(const RuleArgs& args, const LaunchContext& context) {
  if (args.sequences == 0) return;
  const bool pairs =
      args.value_tiles % 2 == 0 && args.sequences * args.value_heads >= context.sm_count;
  pairs ? launch<2>(args, context) : launch<1>(args, context);
}

} // namespace gdn::kernels
