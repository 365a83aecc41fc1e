// Swizzled 64 x 64 bf16 tiles in shared memory: addressing, fragments in and out, rows out to memory.
#pragma once
#include <cstdint>

#include "kernels/common/launch.h"
#include "kernels/common/ptx_sm90.cuh"
#include "kernels/common/wgmma_sm90.cuh"

namespace gdn::kernels {

inline constexpr int kWarpgroup = 128;             // threads
inline constexpr int kMaxSharedBytes = 227 * 1024; // per CTA

// Byte offset of 16-byte piece `piece` (0..7) of row `row` in a swizzled tile.
__device__ __forceinline__ std::uint32_t in_tile(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Position of a thread in its warpgroup: fragment rows 16 warp + g (+ 8), columns 8n + 2t (+ 1).
struct Lane {
  int warp, lane, g, t;
  __device__ Lane()
      : warp(threadIdx.x % kWarpgroup / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
  __device__ int row() const { return 16 * warp + g; }
};

// A 64x64 accumulator, rounded to bf16, into a tile with the same rows and columns.
__device__ __forceinline__ void store_tile(std::uint32_t tile, const Lane& at,
                                           const float (&d)[32]) {
  const int matrix = at.lane / 8, r = at.lane % 8;
  const int row = 16 * at.warp + 8 * (matrix % 2) + r;
#pragma unroll
  for (int n = 0; n < 8; n += 2)
    store_matrix(tile + in_tile(row, n + matrix / 2), pack_bf16(d[4 * n], d[4 * n + 1]),
                 pack_bf16(d[4 * n + 2], d[4 * n + 3]), pack_bf16(d[4 * n + 4], d[4 * n + 5]),
                 pack_bf16(d[4 * n + 6], d[4 * n + 7]));
}

// A 64 (value) x 64 (token) accumulator, packed, into a tile with token rows and value columns.
__device__ __forceinline__ void store_tile_transposed(std::uint32_t tile, const Lane& at,
                                                      const std::uint32_t (&d)[16]) {
  const int matrix = at.lane / 8, r = at.lane % 8;
  const int piece = 2 * at.warp + matrix % 2;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrix_transposed(tile + in_tile(8 * (2 * k + matrix / 2) + r, piece), d[4 * k],
                            d[4 * k + 1], d[4 * k + 2], d[4 * k + 3]);
}

// The reverse: r[i] holds accumulator elements 2i and 2i + 1 of the transposed tile, and
// r[4k..4k+3] is its A operand of step k. Each warp reads the 16 value columns it would write.
__device__ __forceinline__ void load_tile_transposed(std::uint32_t tile, const Lane& at,
                                                     std::uint32_t (&r)[16]) {
  const int matrix = at.lane / 8, row = at.lane % 8;
  const int piece = 2 * at.warp + matrix % 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    std::uint32_t x[4];
    load_matrix_transposed(x, tile + in_tile(8 * (2 * k + matrix / 2) + row, piece));
#pragma unroll
    for (int i = 0; i < 4; ++i) r[4 * k + i] = x[i];
  }
}

// Rounds an accumulator to the A operand of the next product: r[4k..4k+3] is step k.
template <int kCount>
__device__ __forceinline__ void pack_operand(const float (&d)[kCount],
                                             std::uint32_t (&r)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) r[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
}

// Zeros rows `rows`..63 of `tiles` consecutive tiles; `thread` of `threads` (a multiple of 8) take
// part.
__device__ __forceinline__ void zero_tail(char* tile, int tiles, int rows, int thread,
                                          int threads) {
#pragma unroll 1
  for (int i = 0; i < tiles; ++i)
#pragma unroll 1
    for (int at = rows * 128 + thread * 16; at < kTileBytes; at += threads * 16)
      *reinterpret_cast<uint4*>(tile + i * kTileBytes + at) = uint4{0, 0, 0, 0};
}

// Rows of a tile to a token tensor, by one warpgroup: 16-byte pieces, rows below `rows`, columns
// below `width` (of the tile). `row_stride` in elements.
__device__ __forceinline__ void write_rows(Bf16* out, std::int64_t row_stride, const char* tile,
                                           int rows, int width) {
  const int row = threadIdx.x % kWarpgroup / 8, column = threadIdx.x % 8;
  const char* from = tile + in_tile(row, column); // 16 rows further: the same swizzle
  Bf16* to = out + row * row_stride + column * 8;
  if (column * 8 >= width) return;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 16 * row_stride)
    if (row + 16 * i < rows)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * 2048);
}

// Rows of a tile to a token tensor by one warp; as write_rows.
__device__ __forceinline__ void write_rows_by_warp(Bf16* out, std::int64_t row_stride,
                                                   const char* tile, int rows, int width) {
  const int lane = threadIdx.x % 32, column = lane % 8;
  if (column * 8 >= width) return;
#pragma unroll 4
  for (int row = lane / 8; row < rows; row += 4)
    *reinterpret_cast<uint4*>(out + row * row_stride + column * 8) =
        *reinterpret_cast<const uint4*>(tile + in_tile(row, column));
}

// Ring position of a pipeline stage.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

} // namespace gdn::kernels
