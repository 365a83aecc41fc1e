// The state scan: one CTA walks the chunks of one (sequence, value head). Every math warpgroup owns
// 64 value columns and keeps their state transposed (values x keys) in fp32 registers, so each
// product's A operand is a rounded accumulator of the one before and nothing but inputs passes
// through shared memory. One more warpgroup feeds the ring of input tiles and writes results out.
//
//   forward   W = S K^T;  R = V^T - W (rho e^gamma);  Z = R - (R beta) N^T
//             O = (S Q^T)(s rho e^gamma) + Z (P beta)^T
//             S = e^gamma_last S + (Z beta rho e^(gamma_last-gamma)) K
//   rebuild   the same without O: hands S (before the chunk) and Z of every chunk to the backward
#include <cstddef>

#include "kernels/common/check.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_tiles.cuh"

namespace gdn::kernels {
namespace {

enum class Scan { kForward, kRebuild };

template <Scan kScan, int kGroups> // kGroups: math warpgroups
struct Layout {
  static constexpr bool kForward = kScan == Scan::kForward, kRebuild = !kForward;
  static constexpr int kTiles = (kForward ? 6 : 3) + kGroups; // K, N, V, [Q, P]
  static constexpr int kStages = kForward || kGroups == 2 ? 3 : 4;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Tiles of a stage. In a rebuild, V is the way out of Z.
  static constexpr int kK = 0, kN = 2, kV = 3, kQ = kV + kGroups, kP = kQ + kKeyTiles;
  struct Shared {
    char tiles[kStages][kTiles][kTileBytes];
    char state[kForward ? 0 : kGroups][2][kStateBytes]; // images on their way out
    char o[kForward ? kGroups : 0][kTileBytes];         // output on its way out
    float factors[kStages][kForwardFactors][kChunk];
    std::uint64_t full[kStages], empty[kStages];     // of the ring's stages
    std::uint64_t result_full[kStages][kGroups];     // rebuild: a stage holds a chunk's Z
    std::uint64_t state_empty[kGroups][2];           // rebuild: an image has left shared memory
    std::uint64_t o_full[kGroups], o_empty[kGroups]; // forward
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
    char(*tiles)[kTileBytes] = s.tiles[i];
    std::uint64_t* full = &s.full[i];
    barrier_wait(&s.empty[i], ring.parity ^ 1);
    barrier_expect(full, L::kTiles * kTileBytes + kForwardFactors * kChunk * 4);
    const int token = static_cast<int>(item.first_token) + c * kChunk;
    const std::int64_t head =
        static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads + item.head;
    for (int half = 0; half < kKeyTiles; ++half)
      load_box(tiles[L::kK + half], &a.k, full, 64 * half, key_head, token);
    load_bulk(s.factors[i], a.factors + head * kFactors * kChunk, kForwardFactors * kChunk * 4,
              full);
    for (int w = 0; w < kGroups; ++w)
      load_box(tiles[L::kV + w], &a.v, full, 64 * (item.first_tile + w), item.head, token);
    load_box(tiles[L::kN], &a.n, full, 0, item.head, token);
    if constexpr (L::kForward) {
      for (int half = 0; half < kKeyTiles; ++half)
        load_box(tiles[L::kQ + half], &a.q, full, 64 * half, key_head, token);
      load_bulk(tiles[L::kP], a.p + head * kTileBytes, kTileBytes, full);
    }
  }
}

// One warp: takes the results of math warpgroup `me` from shared memory.
template <Scan kScan, int kGroups>
__device__ void write(const RuleArgs& a, typename Layout<kScan, kGroups>::Shared& s,
                      const ScanItem& item) {
  using L = Layout<kScan, kGroups>;
  const int me = threadIdx.x / 32 - 4 * kGroups - 1, lane = threadIdx.x % 32;
  const int tile = item.first_tile + me;
  const std::int64_t row_stride = static_cast<std::int64_t>(a.value_heads) * a.value_dim;
  Bf16* out = L::kForward ? a.o + item.first_token * row_stride +
                                static_cast<std::int64_t>(item.head) * a.value_dim + 64 * tile
                          : nullptr;
  Ring<L::kStages> ring;
  for (int c = 0; c < item.chunks; ++c, ring.advance()) {
    const int i = ring.stage;
    if constexpr (L::kForward) {
      barrier_wait(&s.o_full[me], c & 1);
      write_rows_by_warp(out, row_stride, s.o[me], c == item.chunks - 1 ? item.last_rows : kChunk,
                         a.value_dim - 64 * tile);
      out += kChunk * row_stride;
      warp_arrive(&s.o_empty[me]);
    } else if (lane == 0) {
      barrier_wait(&s.result_full[i][me], ring.parity);
      const std::int64_t image =
          (static_cast<std::int64_t>(item.first_chunk + c) * a.value_heads + item.head) *
              a.value_tiles +
          tile;
      store_bulk(a.states + image * kStateBytes, s.state[me][c & 1], kStateBytes);
      store_bulk(a.z + image * kTileBytes, s.tiles[i][L::kV + me], kTileBytes);
      store_commit();
      store_wait_read<0>();
      barrier_arrive(&s.empty[i]);
      barrier_arrive(&s.state_empty[me][c & 1]);
    }
  }
  if constexpr (L::kRebuild) {
    if (lane == 0) store_wait<0>();
  }
}

template <Scan kScan, int kGroups>
__device__ void compute(const RuleArgs& a, typename Layout<kScan, kGroups>::Shared& s,
                        const ScanItem& item) {
  using L = Layout<kScan, kGroups>;
  using Shared = typename L::Shared;
  constexpr std::uint32_t kStageWord = L::kTiles * kNextTile;
  constexpr bool kEager = kGroups == 1; // a lone warpgroup loads factors while products run
  const Lane at;
  const int me = threadIdx.x / kWarpgroup; // math warpgroup
  const int tile = item.first_tile + me;
  const std::int64_t entry = a.state_slots == nullptr ? item.sequence : a.state_slots[item.sequence];
  const std::int64_t state_at = (entry * a.value_heads + item.head) * a.key_dim * a.value_dim;
  const std::uint32_t tiles = descriptor(smem_address(s.tiles));
  const std::uint32_t base = kept(smem_address(&s));

  float state[64];
  read_state(state, a.state_in == nullptr ? nullptr : a.state_in + state_at, a.key_dim, a.value_dim,
             64 * tile, at);

  // The output of a chunk is completed one chunk later, in the shadow of the next chunk's chain.
  float o[32] = {};         // read of the state, scaled; lacks Z (P beta)^T
  std::uint32_t u[16] = {}; // Z, rounded
  Ring<L::kStages> ring;
  int previous = 0; // stage of the chunk before

  auto value_tile = [&](int stage) { // this warpgroup's V, in a rebuild later Z
    return base + static_cast<std::uint32_t>(offsetof(Shared, tiles)) +
           (stage * L::kTiles + L::kV + me) * kTileBytes;
  };
  auto complete_output = [&](int stage) {
    pin(o);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAlongRow>(o, &u[4 * k],
                                   tiles + stage * kStageWord + L::kP * kNextTile +
                                       step_offset<Contract::kAlongRow>(k));
    products_commit();
  };
  auto arrive = [&](std::uint32_t offset, int index) { // this warp, at barrier `index` of an array
    warp_arrive(base + offset + 8 * index);
  };
  // Hands the output of chunk c to the writing warp.
  auto hand_over = [&](int c, const std::uint32_t(&rounded)[16]) {
    barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, o_empty)) + 8 * me,
                 (c & 1) ^ 1);
    store_tile_transposed(base + static_cast<std::uint32_t>(offsetof(Shared, o)) + me * kTileBytes,
                          at, rounded);
    arrive(static_cast<std::uint32_t>(offsetof(Shared, o_full)), me);
  };

  if (item.chunks > 0) barrier_wait(&s.full[0], 0);
  for (int c = 0; c < item.chunks; ++c) {
    const int i = __shfl_sync(~0u, ring.stage, 0); // uniform, for the descriptors' sake
    const std::uint32_t stage = tiles + i * kStageWord;
    const std::uint32_t factors = base + static_cast<std::uint32_t>(offsetof(Shared, factors)) +
                                  i * kForwardFactors * kChunk * 4 + 8 * at.t;
    auto factor = [&](int which, int n) {
      return load_shared_pair(factors + (which * kChunk + 8 * n) * 4);
    };
    auto load_factors = [&](float2(&out)[8], int which) {
#pragma unroll
      for (int n = 0; n < 8; ++n) out[n] = factor(which, n);
    };
    if (c == item.chunks - 1 && item.last_rows < kChunk) {
      // what lies behind the sequence may be anything: K, N and the V slices
      zero_tail(s.tiles[i][0], 3 + kGroups, item.last_rows, threadIdx.x, kGroups * kWarpgroup);
      fence_async_proxy();
      named_barrier(1, kGroups * kWarpgroup);
    }

    std::uint32_t v[16], operand[32]; // V; the state, rounded
    float2 decay[8], beta[8], rest[8], read[8];
    if constexpr (kEager) {
      load_tile_transposed(value_tile(i), at, v);
      load_factors(decay, kKeyDecay);
    }
    pack_operand(state, operand);
    float w[32];
    products_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      product<Contract::kAlongRow>(
          w, &operand[4 * k],
          stage + (L::kK + k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4), k > 0);
    products_commit();
    if constexpr (L::kForward) complete_output(previous);

    if constexpr (kEager)
      load_factors(beta, kBeta);
    else
      load_tile_transposed(value_tile(i), at, v);

    if constexpr (L::kRebuild) {
      const int buffer = c & 1;
      barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, state_empty)) +
                       (2 * me + buffer) * 8,
                   (c / 2 & 1) ^ 1);
      store_state(base + static_cast<std::uint32_t>(offsetof(Shared, state)) +
                      (2 * me + buffer) * kStateBytes,
                  at, operand);
    }

    // R = V - K S, elementwise in the transposed layout
    float z[32];
    std::uint32_t r[16];
    if constexpr (L::kForward)
      products_wait<1>(w);
    else
      products_wait<0>(w, operand);
    if constexpr (!kEager) {
      load_factors(decay, kKeyDecay);
      load_factors(beta, kBeta);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        z[4 * n + 2 * h] = bf16_low(v[2 * n + h]) - decay[n].x * w[4 * n + 2 * h];
        z[4 * n + 2 * h + 1] = bf16_high(v[2 * n + h]) - decay[n].y * w[4 * n + 2 * h + 1];
        r[2 * n + h] = pack_bf16(-beta[n].x * z[4 * n + 2 * h], -beta[n].y * z[4 * n + 2 * h + 1]);
      }

    // Z = R - N (beta R)
    pin(z);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAlongRow>(z, &r[4 * k],
                                   stage + L::kN * kNextTile + step_offset<Contract::kAlongRow>(k));
    products_commit();
    std::uint32_t rounded[16]; // the output of the chunk before
    if constexpr (L::kForward) {
      products_wait<1>(o, u);
      if (c > 0) arrive(static_cast<std::uint32_t>(offsetof(Shared, empty)), previous);
      pack_operand(o, rounded);
      products_begin();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        product<Contract::kAlongRow>(
            o, &operand[4 * k],
            stage + (L::kQ + k / 4) * kNextTile + step_offset<Contract::kAlongRow>(k % 4), k > 0);
      products_commit();
    }
    const float last =
        exp2_fast(load_shared(factors - 8 * at.t + (kGamma * kChunk + kChunk - 1) * 4));
#pragma unroll
    for (int e = 0; e < 64; ++e) state[e] *= last;
    if constexpr (kEager) load_factors(rest, kWriteRest);
    if constexpr (L::kForward)
      products_wait<1>(z, r);
    else
      products_wait<0>(z, r);
    if constexpr (!kEager) load_factors(rest, kWriteRest);

    std::uint32_t written[16]; // U scaled for the state
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        written[2 * n + h] =
            pack_bf16(rest[n].x * z[4 * n + 2 * h], rest[n].y * z[4 * n + 2 * h + 1]);

    pin(state);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product<Contract::kAcrossRows>(state, &written[4 * k],
                                     stage + L::kK * kNextTile +
                                         step_offset<Contract::kAcrossRows>(k));
    products_commit();

    // In the shadow of the state update
    ring.advance();
    if constexpr (L::kForward) {
      if constexpr (kEager) load_factors(read, kQueryDecay);
      pack_operand(z, u);
      if (c > 0) hand_over(c - 1, rounded);
      if (c + 1 < item.chunks)
        barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, full)) + 8 * ring.stage,
                     ring.parity);
      products_wait<0>(state, written, o, operand);
      if constexpr (!kEager) load_factors(read, kQueryDecay);
#pragma unroll
      for (int e = 0; e < 32; ++e) o[e] *= e % 2 == 0 ? read[e / 4].x : read[e / 4].y;
    } else {
      pack_operand(z, rounded);
      store_tile_transposed(value_tile(i), at, rounded);
      fence_async_proxy();
      if (c + 1 < item.chunks)
        barrier_wait(base + static_cast<std::uint32_t>(offsetof(Shared, full)) + 8 * ring.stage,
                     ring.parity);
      products_wait<0>(state, written);
      // now that no product reads the stage
      arrive(static_cast<std::uint32_t>(offsetof(Shared, result_full)), i * kGroups + me);
    }
    previous = i;
  }

  if constexpr (L::kForward) {
    if (item.chunks > 0) {
      complete_output(previous);
      products_wait<0>(o, u);
      std::uint32_t rounded[16];
      pack_operand(o, rounded);
      hand_over(item.chunks - 1, rounded);
    }
    if (a.state_out != nullptr)
      write_state(state, a.state_out + state_at, a.key_dim, a.value_dim, 64 * tile, at);
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
      barrier_init(&s.empty[i], L::kForward ? 4 * kGroups * kWarpArrivals : kGroups);
      for (int w = 0; w < kGroups; ++w) barrier_init(&s.result_full[i][w], 4 * kWarpArrivals);
    }
    for (int w = 0; w < kGroups; ++w) {
      barrier_init(&s.state_empty[w][0], 1);
      barrier_init(&s.state_empty[w][1], 1);
      barrier_init(&s.o_full[w], 4 * kWarpArrivals);
      barrier_init(&s.o_empty[w], kWarpArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const ScanRole role = scan_role<kGroups>();
  if (role != ScanRole::kMath) {
    if constexpr (kGroups == 2) give_registers<40>();
    if (role == ScanRole::kLoad && threadIdx.x % 32 == 0) feed<kScan, kGroups>(a, s, item);
    if (role == ScanRole::kWrite) write<kScan, kGroups>(a, s, item);
  } else {
    if constexpr (kGroups == 2) take_registers<232>();
    compute<kScan, kGroups>(a, s, item);
  }
}

template <Scan kScan, int kGroups>
void launch(const RuleArgs& args, const LaunchContext& context) {
  using L = Layout<kScan, kGroups>;
  const auto kernel = gdn_scan_kernel<kScan, kGroups>;
  constexpr int kBytes = sizeof(typename L::Shared);
  static_assert(kBytes <= kMaxSharedBytes);
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
  const bool pairs =
      args.value_tiles % 2 == 0 && args.sequences * args.value_heads >= context.sm_count;
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
