#include "kernels/ranks/rows.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) map_kernel(const RowSegment* segments, std::int32_t* map) {
  const RowSegment s = segments[blockIdx.x];
  for (int i = threadIdx.x; i < s.rows; i += kThreads) map[s.from + i] = s.to + i;
}

__global__ void __launch_bounds__(kThreads) shift_kernel(const std::int64_t* from, const std::int32_t* positions, std::int64_t all,
                                                         const std::int32_t* tokens, std::int64_t shift, std::int64_t outside, Matrix to) {
  const std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (i >= to.rows) return;
  const std::int64_t t = tokens[i], at = t + shift;
  const bool inside = at < all && positions[at] == positions[t] + shift;
  store_index(to, i, 0, inside ? from[at] : outside);
}

} // namespace

void segments_to_map(const RowSegment* segments, int count, std::int32_t* map, const LaunchContext& context) {
  if (count == 0) return;
  map_kernel<<<static_cast<unsigned>(count), kThreads, 0, context.stream>>>(segments, map);
  check_launch("segments_to_map");
}

void shift_tokens_of(const std::int64_t* from, const std::int32_t* positions, std::int64_t all, const std::int32_t* tokens, std::int64_t shift,
                     std::int64_t outside, const Matrix& to, const LaunchContext& context) {
  if (to.rows == 0) return;
  shift_kernel<<<static_cast<unsigned>((to.rows + kThreads - 1) / kThreads), kThreads, 0, context.stream>>>(from, positions, all, tokens, shift,
                                                                                                            outside, to);
  check_launch("shift_tokens_of");
}

} // namespace gdn::kernels
