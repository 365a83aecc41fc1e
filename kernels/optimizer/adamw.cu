#include "kernels/optimizer/adamw.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

__global__ void __launch_bounds__(256) adamw_kernel(const __grid_constant__ AdamWParams p) {
  const std::int64_t step = std::int64_t{gridDim.x} * 256;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < p.n; i += step) {
    const float g = p.gradient_scale * p.gradient[i], w = p.master[i];
    const float m = p.beta1 * p.m[i] + (1.0f - p.beta1) * g;
    const float v = p.beta2 * p.v[i] + (1.0f - p.beta2) * g * g;
    p.m[i] = m;
    p.v[i] = v;
    const float update = m / p.correction1 / (sqrtf(v / p.correction2) + p.eps);
    const float next = w - p.lr * (update + p.weight_decay * w);
    p.master[i] = next;
    if (p.live) static_cast<Bf16*>(p.live)[i].bits = RowVector<8>::narrow(next);
  }
}

__device__ double to_open(std::uint32_t low, std::uint32_t high) { // (k + 1/2) / 2^52
  const std::uint64_t bits = std::uint64_t{high} << 32 | low;
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

__global__ void __launch_bounds__(256)
    normal_kernel(float* x, std::int64_t n, double stddev, std::uint64_t seed, std::uint64_t where, std::int64_t first) {
  const std::int64_t step = std::int64_t{gridDim.x} * 256;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < n; i += step) {
    const std::int64_t element = first + i;
    std::uint32_t c[4] = {static_cast<std::uint32_t>(element), static_cast<std::uint32_t>(element >> 32), static_cast<std::uint32_t>(where),
                          static_cast<std::uint32_t>(where >> 32)};
    std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * c[0], b = std::uint64_t{0xCD9E8D57u} * c[2];
      const std::uint32_t c0 = static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k0, c2 = static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k1;
      c[1] = static_cast<std::uint32_t>(b);
      c[3] = static_cast<std::uint32_t>(a);
      c[0] = c0;
      c[2] = c2;
    }
    x[i] = static_cast<float>(stddev * (sqrt(-2.0 * log(to_open(c[0], c[1]))) * cospi(2.0 * to_open(c[2], c[3]))));
  }
}

} // namespace

void adamw(const AdamWParams& p, const LaunchContext& context) {
  if (p.n == 0) return;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((p.n + 255) / 256, std::int64_t{context.sm_count} * 64));
  adamw_kernel<<<ctas, 256, 0, context.stream>>>(p);
  check_launch("adamw_kernel");
}

void fill_normal(float* x, std::int64_t n, double stddev, std::uint64_t seed, std::uint64_t where, std::int64_t first,
                 const LaunchContext& context) {
  if (n == 0) return;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((n + 255) / 256, std::int64_t{context.sm_count} * 64));
  normal_kernel<<<ctas, 256, 0, context.stream>>>(x, n, stddev, seed, where, first);
  check_launch("normal_kernel");
}

} // namespace gdn::kernels
