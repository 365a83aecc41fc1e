// States between the pool and the dense form that prefill works on.
#include "kernels/common/check.h"
#include "kernels/gdn/decode.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gdn_move_states_kernel(const __grid_constant__ GdnMoveStatesParams p, std::int64_t fours) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t request = index / fours, at = index % fours;
  if (request >= p.requests) return;
  const std::int64_t slot = p.slots[request];
  float4* const dense = reinterpret_cast<float4*>(p.dense) + index;
  float4* const pool = reinterpret_cast<float4*>(p.pool) + slot * fours + at;
  if (!p.to_pool)
    *dense = slot < 0 ? float4{0, 0, 0, 0} : *pool;
  else if (slot >= 0)
    *pool = *dense;
}

} // namespace

void gdn_move_states(const GdnMoveStatesParams& p, const LaunchContext& context) {
  if (p.elements <= 0 || p.elements % 4 != 0 || p.requests < 0)
    refuse("gdn_move_states", {{"elements", p.elements}, {"requests", p.requests}}, "elements in fours");
  const std::int64_t fours = p.elements / 4, threads = p.requests * fours;
  if (threads == 0) return;
  const auto ctas = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  gdn_move_states_kernel<<<ctas, kThreads, 0, context.stream>>>(p, fours);
  check_launch("gdn_move_states_kernel");
}

} // namespace gdn::kernels
