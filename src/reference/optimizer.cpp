#include "reference/optimizer.h"

#include <algorithm>
#include <cmath>

#include "reference/detail.h"

namespace gdn::reference {

void adamw_step(const AdamW& a, std::span<const float> grad, std::span<float> master,
                std::span<float> m, std::span<float> v, Values param) {
  const std::size_t n = grad.size();
  expect(master.size() == n && m.size() == n && v.size() == n, "optimizer state sizes");
  expect(!param || param.size() == static_cast<int64>(n), "parameter size");
  const auto step = static_cast<double>(a.step);
  const double correct1 = 1 - std::pow(a.beta1, step), correct2 = 1 - std::pow(a.beta2, step);
  for (std::size_t i = 0; i < n; ++i) {
    const double g = a.grad_scale * grad[i], w = master[i];
    m[i] = static_cast<float>(a.beta1 * m[i] + (1 - a.beta1) * g);
    v[i] = static_cast<float>(a.beta2 * v[i] + (1 - a.beta2) * g * g);
    const double update = (m[i] / correct1) / (std::sqrt(v[i] / correct2) + a.eps);
    master[i] = static_cast<float>(w - a.lr * (update + a.weight_decay * w));
  }
  if (!param) return;
  for (int64 i = 0; i < param.rows; ++i)
    for (int64 j = 0; j < param.cols; ++j) param.set(i, j, master[at(i * param.cols + j)]);
}

double sum_of_squares(std::span<const float> grad) {
  double sum = 0;
  for (const float g : grad) sum += static_cast<double>(g) * g;
  return sum;
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

} // namespace gdn::reference
