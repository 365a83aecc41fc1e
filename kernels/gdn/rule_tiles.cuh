// What the kernels of the gated delta rule share: the layout of the intermediates they hand to each
// other, and their states. Mathematics and names: NOTES.md.
#pragma once
#include <cstdint>

#include "kernels/common/tiles_sm90.cuh"
#include "kernels/gdn/rule_kernels.h"

namespace gdn::kernels {

inline constexpr int kStateBytes = 2 * kTileBytes; // one 64 (value) x 128 (key) slice of a state
inline constexpr int kKeyTiles = 2;                // key width is padded to 128 columns

// Per chunk and value head: fp32 factors of the 64 rows. Rows past the end of a sequence hold 0,
// and kGamma the value of the last valid row. The scans load a prefix of them.
enum Factor {
  kGamma,      // inclusive log decay inside the chunk, times log2(e)
  kBeta,       // write strength
  kQueryDecay, // scale * rho_q * e^gamma
  kKeyDecay,   // rho_k * e^gamma
  kWriteRest,  // beta * rho_k * e^(gamma_last - gamma)
  kKeyRest,    // rho_k * e^(gamma_last - gamma)
  kWriteDecay, // beta * rho_k * e^gamma
  kQueryNorm,  // rho_q, 1 without the in-kernel norm
  kKeyNorm,    // rho_k
  kFactors
};
inline constexpr int kForwardFactors = kWriteRest + 1;  // what the state scan needs
inline constexpr int kReverseFactors = kWriteDecay + 1; // the reverse scan
inline constexpr int kFactorBytes = kFactors * kChunk * 4;

// A 64 (value) x 128 (key) state operand into its two tiles (key halves).
__device__ __forceinline__ void store_state(std::uint32_t tiles, const Lane& at,
                                            const std::uint32_t (&s)[32]) {
  const int matrix = at.lane / 8, r = at.lane % 8;
  const int row = 16 * at.warp + 8 * (matrix % 2) + r;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    store_matrix(tiles + (k / 4) * kTileBytes + in_tile(row, 2 * (k % 4) + matrix / 2), s[4 * k],
                 s[4 * k + 1], s[4 * k + 2], s[4 * k + 3]);
}

// State [sequences, value heads, key dim, value dim] fp32 <-> the transposed accumulator of one
// 64-column slice starting at column `first`.
__device__ __forceinline__ void read_state(float (&s)[64], const float* state, int key_dim,
                                           int value_dim, int first, const Lane& at) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + 2 * at.t + i % 2;
    const int value = first + at.row() + 8 * (i % 4 / 2);
    s[i] = state != nullptr && key < key_dim && value < value_dim
               ? state[static_cast<std::int64_t>(key) * value_dim + value]
               : 0.0f;
  }
}
__device__ __forceinline__ void write_state(const float (&s)[64], float* state, int key_dim,
                                            int value_dim, int first, const Lane& at) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + 2 * at.t + i % 2;
    const int value = first + at.row() + 8 * (i % 4 / 2);
    if (key < key_dim && value < value_dim)
      state[static_cast<std::int64_t>(key) * value_dim + value] = s[i];
  }
}

// What one CTA of a scan works on: `groups` 64-column slices of one (sequence, value head). Long
// sequences come first.
struct ScanItem {
  int sequence, head, first_tile;
  int first_chunk, chunks, last_rows;
  std::int64_t first_token;
};

__device__ inline ScanItem make_scan_item(const RuleArgs& a, int groups) {
  const int slices = a.value_tiles / groups;
  ScanItem item;
  item.first_tile = static_cast<int>(blockIdx.x % slices) * groups;
  item.head = static_cast<int>(blockIdx.x / slices % a.value_heads);
  item.sequence = a.order[blockIdx.x / slices / a.value_heads];
  item.first_chunk = a.offsets[item.sequence];
  item.chunks = a.offsets[item.sequence + 1] - item.first_chunk;
  item.last_rows = item.chunks > 0 ? a.chunks[item.first_chunk + item.chunks - 1].rows : 0;
  item.first_token = item.chunks > 0 ? a.chunks[item.first_chunk].first_token : 0;
  return item;
}

// A scan's CTA: math warpgroups, then one warpgroup whose first warp loads and whose next warps
// write what the math warpgroups leave in shared memory, one warp for each of them.
enum class ScanRole { kMath, kLoad, kWrite, kIdle };
template <int kGroups>
__device__ __forceinline__ ScanRole scan_role() {
  const int warp = static_cast<int>(threadIdx.x / 32) - 4 * kGroups;
  return warp < 0          ? ScanRole::kMath
         : warp == 0       ? ScanRole::kLoad
         : warp <= kGroups ? ScanRole::kWrite
                           : ScanRole::kIdle;
}

} // namespace gdn::kernels
