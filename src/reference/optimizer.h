#pragma once
#include <span>

#include "reference/view.h"

// AdamW with decoupled weight decay on fp32 master weights, and global-norm clipping.
namespace gdn::reference {

struct AdamW {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  int64 step = 1;        // 1-based, for bias correction
  double grad_scale = 1; // multiplies the gradient (clipping, averaging)
};

// m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, w -= lr (m^ / (sqrt(v^) + eps) + wd w). Then `param`,
// the live copy in any dtype, is the rounded master; absent where the master is the parameter
// itself.
void adamw_step(const AdamW& a, std::span<const float> grad, std::span<float> master,
                std::span<float> m, std::span<float> v, Values param);

// Sum of squares in double, in order.
double sum_of_squares(std::span<const float> grad);
// min(1, max_norm / (norm + 1e-6)), as Megatron-LM clips; 1 when max_norm <= 0.
double clip_factor(double norm, double max_norm);

} // namespace gdn::reference
