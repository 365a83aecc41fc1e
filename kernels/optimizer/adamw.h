#pragma once
#include "kernels/common/matrix.h"

namespace gdn::kernels {

// One AdamW step of n parameters, decoupled weight decay (Loshchilov and Hutter):
//   g = scale gradient;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + decay w);  live = w rounded
struct AdamWParams {
  std::int64_t n = 0;
  const float* gradient = nullptr;
  float *master = nullptr, *m = nullptr, *v = nullptr;
  void* live = nullptr; // bf16, or null: the master is the parameter
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, gradient_scale = 1;
  float correction1 = 1, correction2 = 1; // 1 - beta^step
};
void adamw(const AdamWParams& params, const LaunchContext& context);

// x[i] = stddev * normal(first + i) of a counter-based generator: Philox4x32-10 at counter (first + i, where), key seed,
// Box-Muller in double.
void fill_normal(float* x, std::int64_t n, double stddev, std::uint64_t seed, std::uint64_t where, std::int64_t first,
                 const LaunchContext& context);

} // namespace gdn::kernels
