#include "kernels/moe/rows.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

struct SpreadParams {
  Matrix x, row_map;
  Gradient rows;
};
template <int N>
struct Spread {
  SpreadParams p;
  __device__ void operator()(std::int64_t t, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, t, c);
    for (std::int64_t j = 0; j < p.row_map.cols; ++j) {
      const std::int64_t row = load_index(p.row_map, t, j);
      if (row >= 0) put_values<N>(p.rows, row, c, x);
    }
  }
};

struct CollectParams {
  Matrix rows, row_map;
  Gradient y;
};
template <int N>
struct Collect {
  CollectParams p;
  __device__ void operator()(std::int64_t t, std::int64_t c) const {
    Values<N> sum;
#pragma unroll
    for (int i = 0; i < N; ++i) sum.x[i] = 0.0f;
#pragma unroll 4
    for (std::int64_t j = 0; j < p.row_map.cols; ++j) {
      const std::int64_t row = load_index(p.row_map, t, j);
      if (row < 0) continue;
      const Values<N> x = load_values<N>(p.rows, row, c);
#pragma unroll
      for (int i = 0; i < N; ++i) sum.x[i] += x.x[i];
    }
    put_values<N>(p.y, t, c, sum);
  }
};

} // namespace

void spread_rows(const Matrix& x, const Matrix& row_map, const Gradient& rows, const LaunchContext& context) {
  for_rows<Spread>(SpreadParams{x, row_map, rows}, x.rows, x.cols, vector_matrices({x, rows.to}), context, "spread_rows");
}
void collect_rows(const Matrix& rows, const Matrix& row_map, const Gradient& y, const LaunchContext& context) {
  for_rows<Collect>(CollectParams{rows, row_map, y}, y.to.rows, y.to.cols, vector_matrices({rows, y.to}), context, "collect_rows");
}

} // namespace gdn::kernels
