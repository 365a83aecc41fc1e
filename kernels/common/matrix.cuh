// Elements of matrices whose dtype is known at run time, and kernels over all elements of a matrix.
// The dtype is the same for all threads, so telling it apart costs nothing that memory does not hide.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/common/check.h"
#include "kernels/common/matrix.h"
#include "kernels/common/row_vector.cuh"

namespace gdn::kernels {

// N neighbouring values of a row: 8 with 16-byte accesses, or 1.
template <int N>
struct Values {
  float x[N];
};

template <int N>
__device__ __forceinline__ Values<N> load_values(const Matrix& m, std::int64_t row,
                                                 std::int64_t col) {
  static_assert(N == 1 || N == 8);
  Values<N> v;
  const std::int64_t at = row * m.stride + col;
  if (m.dtype == DType::BF16) {
    const Bf16* p = static_cast<const Bf16*>(m.data) + at;
    if constexpr (N == 8) {
      const RowVector<8> r = RowVector<8>::load(p, true);
#pragma unroll
      for (int i = 0; i < 8; ++i) v.x[i] = r.x[i];
    } else {
      v.x[0] = RowVector<8>::widen(p->bits);
    }
  } else {
    const float* p = static_cast<const float*>(m.data) + at;
    if constexpr (N == 8) {
      const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
      v.x[0] = a.x, v.x[1] = a.y, v.x[2] = a.z, v.x[3] = a.w;
      v.x[4] = b.x, v.x[5] = b.y, v.x[6] = b.z, v.x[7] = b.w;
    } else {
      v.x[0] = *p;
    }
  }
  return v;
}

template <int N>
__device__ __forceinline__ void store_values(const Matrix& m, std::int64_t row, std::int64_t col,
                                             const Values<N>& v) {
  const std::int64_t at = row * m.stride + col;
  if (m.dtype == DType::BF16) {
    Bf16* p = static_cast<Bf16*>(m.data) + at;
    if constexpr (N == 8) {
      RowVector<8> r;
#pragma unroll
      for (int i = 0; i < 8; ++i) r.x[i] = v.x[i];
      r.store(p, true);
    } else {
      p->bits = RowVector<8>::narrow(v.x[0]);
    }
  } else {
    float* p = static_cast<float*>(m.data) + at;
    if constexpr (N == 8) {
      reinterpret_cast<float4*>(p)[0] = float4{v.x[0], v.x[1], v.x[2], v.x[3]};
      reinterpret_cast<float4*>(p)[1] = float4{v.x[4], v.x[5], v.x[6], v.x[7]};
    } else {
      *p = v.x[0];
    }
  }
}

// Writes or adds.
template <int N>
__device__ __forceinline__ void put_values(const Gradient& g, std::int64_t row, std::int64_t col,
                                           Values<N> v) {
  if (g.accumulate) {
    const Values<N> old = load_values<N>(g.to, row, col);
#pragma unroll
    for (int i = 0; i < N; ++i) v.x[i] += old.x[i];
  }
  store_values<N>(g.to, row, col, v);
}

__device__ __forceinline__ float load_value(const Matrix& m, std::int64_t row, std::int64_t col) {
  return load_values<1>(m, row, col).x[0];
}
__device__ __forceinline__ void store_value(const Matrix& m, std::int64_t row, std::int64_t col,
                                            float value) {
  store_values<1>(m, row, col, {value});
}
__device__ __forceinline__ void put_value(const Gradient& g, std::int64_t row, std::int64_t col,
                                          float value) {
  put_values<1>(g, row, col, {value});
}

// Indices: Int32, Int64 or Bool.
__device__ __forceinline__ std::int64_t load_index(const Matrix& m, std::int64_t row,
                                                   std::int64_t col) {
  const std::int64_t at = row * m.stride + col;
  if (m.dtype == DType::Int64) return static_cast<const std::int64_t*>(m.data)[at];
  if (m.dtype == DType::Int32) return static_cast<const std::int32_t*>(m.data)[at];
  return static_cast<const unsigned char*>(m.data)[at];
}
__device__ __forceinline__ void store_index(const Matrix& m, std::int64_t row, std::int64_t col,
                                            std::int64_t value) {
  const std::int64_t at = row * m.stride + col;
  if (m.dtype == DType::Int64) static_cast<std::int64_t*>(m.data)[at] = value;
  else if (m.dtype == DType::Int32) static_cast<std::int32_t*>(m.data)[at] = static_cast<std::int32_t>(value);
  else static_cast<unsigned char*>(m.data)[at] = static_cast<unsigned char>(value);
}

// True if all rows can be read eight values at a time; absent matrices never hinder.
inline bool vector_matrices(std::initializer_list<Matrix> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [](const Matrix& m) {
    const std::int64_t element = m.dtype == DType::BF16 ? 2 : 4;
    return m.data == nullptr || (reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0 && m.cols % 8 == 0 &&
                                 (m.rows <= 1 || m.stride * element % 16 == 0));
  });
}

// f(row, first column) for every N columns of every row.
template <int N, class F>
__global__ void __launch_bounds__(256) rows_kernel(std::int64_t total, std::int64_t per_row, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 256;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < total; i += step) {
    const std::int64_t row = total <= 0xffffffffll
                                 ? static_cast<std::int64_t>(static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(per_row))
                                 : i / per_row;
    f(row, (i - row * per_row) * N);
  }
}

// Runs F<8> or F<1> (a functor made from `params`) over rows x cols.
template <template <int> class F, class P>
void for_rows(const P& params, std::int64_t rows, std::int64_t cols, bool vector,
              const LaunchContext& context, const char* name) {
  vector = vector && cols % 8 == 0;
  const std::int64_t per_row = vector ? cols / 8 : cols, total = rows * per_row;
  if (total == 0) return;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((total + 255) / 256, std::int64_t{context.sm_count} * 32));
  if (vector) rows_kernel<8><<<ctas, 256, 0, context.stream>>>(total, per_row, F<8>{params});
  else rows_kernel<1><<<ctas, 256, 0, context.stream>>>(total, per_row, F<1>{params});
  check_launch(name);
}

// Sum over the 256 threads of a CTA, to all of them, in fixed order. `sums`: one float a warp.
__device__ __forceinline__ float block_sum(float x, float (&sums)[8]) {
  x = lane_sum<32>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += sums[i];
  return total;
}

} // namespace gdn::kernels
