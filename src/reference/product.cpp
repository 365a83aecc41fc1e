#include "reference/product.h"

#include <algorithm>

#include <Eigen/Core>

#include "core/units.h"

namespace gdn::reference {
namespace {

constexpr int64 kRows = 16, kDepth = 256, kCols = 64; // largest tile product
constexpr int64 kBlock = 32 * kRows;                  // rows that share a packed tile of b

template <class A> using Matrix = Eigen::Matrix<A, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// to [rows, cols] (row-major, padded with zeros) = the leading `m` x `n` part of `from`.
template <class A, class T>
void pack(Strided<T> from, int64 m, int64 n, int64 rows, int64 cols, A* to) {
  if (m < rows || n < cols) std::fill(to, to + rows * cols, A(0));
  if (from.col == 1) {
    for (int64 i = 0; i < m; ++i)
      for (int64 j = 0; j < n; ++j) to[i * cols + j] = static_cast<A>(from.data[i * from.row + j]);
  } else {
    for (int64 j = 0; j < n; ++j)
      for (int64 i = 0; i < m; ++i)
        to[i * cols + j] = static_cast<A>(from.data[i * from.row + j * from.col]);
  }
}

template <class T> Strided<T> moved(Strided<T> s, int64 i, int64 j) {
  return {s.data + i * s.row + j * s.col, s.row, s.col};
}

} // namespace

template <class A>
void tile_product(int64 m, int64 n, int64 k, A factor, const A* a, const A* b, A* c) {
  const Eigen::Map<const Matrix<A>> ma(a, m, k), mb(b, k, n);
  Eigen::Map<Matrix<A>>(c, m, n).noalias() += factor * (ma * mb);
}

template <class O, class TA, class TB>
void product(int64 m, int64 n, int64 k, Strided<TA> a, Strided<TB> b, const Acc<O>* bias,
             Mat<O> out, Write write) {
  using A = Acc<O>;
  // One tile shape per (n, k), whatever the number of rows.
  const int64 tile_depth = std::min(kDepth, round_up(k, 16));
  const int64 tile_cols = std::min(kCols, round_up(n, 16));
  Matrix<A> ta(kRows, tile_depth), tb(tile_depth, tile_cols);
  Matrix<A> tc(std::min(kBlock, round_up(m, kRows)), tile_cols);
  for (int64 i0 = 0; i0 < m; i0 += kBlock) {
    const int64 block = std::min(kBlock, m - i0);
    for (int64 j0 = 0; j0 < n; j0 += tile_cols) {
      const int64 cols = std::min(tile_cols, n - j0);
      tc.setZero();
      for (int64 k0 = 0; k0 < k; k0 += tile_depth) {
        const int64 depth = std::min(tile_depth, k - k0);
        pack(moved(b, k0, j0), depth, cols, tile_depth, tile_cols, tb.data());
        for (int64 i = 0; i < block; i += kRows) {
          const int64 rows = std::min(kRows, block - i);
          pack(moved(a, i0 + i, k0), rows, depth, kRows, tile_depth, ta.data());
          tile_product(kRows, tile_cols, tile_depth, A(1), ta.data(), tb.data(), &tc(i, 0));
        }
      }
      for (int64 i = 0; i < block; ++i) {
        A* c = &tc(i, 0);
        if (bias)
          for (int64 j = 0; j < cols; ++j) c[j] += bias[j0 + j];
        store_row(c, cols, &out(i0 + i, j0), write);
      }
    }
  }
}

template void tile_product<float>(int64, int64, int64, float, const float*, const float*, float*);
template void tile_product<double>(int64, int64, int64, double, const double*, const double*,
                                   double*);
#define GDN_PRODUCT(O, TA, TB)                                                                     \
  template void product<O, TA, TB>(int64, int64, int64, Strided<TA>, Strided<TB>, const Acc<O>*,   \
                                   Mat<O>, Write);
GDN_PRODUCT(bf16, bf16, bf16)
GDN_PRODUCT(float, bf16, bf16)
GDN_PRODUCT(bf16, float, bf16)
GDN_PRODUCT(float, float, bf16)
GDN_PRODUCT(float, float, float)
GDN_PRODUCT(double, double, double)
#undef GDN_PRODUCT

} // namespace gdn::reference
