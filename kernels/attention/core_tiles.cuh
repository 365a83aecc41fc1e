// What the kernels of attention share. A tile is 64 tokens of one head: kTiles images of 64 columns, columns
// past the head's width zero.
#pragma once
#include "kernels/attention/core.h"
#include "kernels/common/check.h"
#include "kernels/common/tensor_map.h"
#include "kernels/common/tiles_sm90.cuh"

namespace gdn::kernels {

inline constexpr int kAttentionThreads = 3 * kWarpgroup; // two warpgroups of math, one that loads
inline constexpr float kLog2e = 1.4426950408889634f;

inline CUtensorMap head_map(const char* name, const Matrix& m, int dim, int rows = 64) {
  return make_box_map({name, m.data, m.rows, m.cols / dim, dim, m.stride, dim}, rows, DType::BF16);
}

inline void check_attention(const AttentionShape& s, const char* kernel) {
  if (s.dim % 8 != 0 || s.dim < 8 || s.dim > 256 || s.kv_heads < 1 || s.heads % s.kv_heads != 0)
    refuse(kernel, {{"head width", s.dim}, {"heads", s.heads}, {"kv heads", s.kv_heads}},
           "widths are multiples of 8 up to 256, heads a multiple of kv heads");
}

// d += a b^T: both tiles along their columns.
template <int kTiles>
__device__ __forceinline__ void scores(float (&d)[32], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < 4 * kTiles; ++k)
    product<Contract::kAlongRow, Contract::kAlongRow>(d, a + k / 4 * kNextTile + step_offset<Contract::kAlongRow>(k % 4),
                                                      b + k / 4 * kNextTile + step_offset<Contract::kAlongRow>(k % 4), k > 0);
}

// d += p b over half of the 64 rows of b, which are columns of p, in registers.
template <int kTiles>
__device__ __forceinline__ void weighted_rows(float (&d)[kTiles / 2][64], const std::uint32_t (&p)[16], std::uint32_t b, int half) {
#pragma unroll
  for (int columns = 0; columns < kTiles / 2; ++columns)
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; ++k)
      product<Contract::kAcrossRows>(d[columns], &p[4 * k], b + 2 * columns * kNextTile + step_offset<Contract::kAcrossRows>(k));
}

template <int kHalves>
__device__ __forceinline__ void pin_all(float (&d)[kHalves][64]) {
#pragma unroll
  for (int i = 0; i < kHalves; ++i) pin(d[i]);
}

// Rows below `rows` of an accumulator times `factor` of the thread's two rows, to `out` (+)=.
template <int kHalves>
__device__ __forceinline__ void write_head(const float (&d)[kHalves][64], const float (&factor)[2], Bf16* out,
                                           std::int64_t stride, int rows, int dim, bool accumulate, const Lane& at) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row() + 8 * h;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int column = 128 * half + 8 * n + 2 * at.t;
        if (column >= dim) continue;
        auto* const pair = reinterpret_cast<std::uint32_t*>(out + row * stride + column);
        float x = d[half][4 * n + 2 * h] * factor[h], y = d[half][4 * n + 2 * h + 1] * factor[h];
        if (accumulate) {
          const std::uint32_t old = *pair;
          x += bf16_low(old);
          y += bf16_high(old);
        }
        *pair = pack_bf16(x, y);
      }
    }
}

// One tile of a head into shared memory: the rows of the map's boxes.
template <int kTiles, int kBytes>
__device__ __forceinline__ void load_head(char (*dst)[kBytes], const CUtensorMap* map, std::uint64_t* bar, int head, int token) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) load_box(dst[i], map, bar, 64 * i, head, token);
}

} // namespace gdn::kernels
