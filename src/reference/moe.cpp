#include "reference/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference/detail.h"
#include "reference/gates.h"

namespace gdn::reference {
namespace {

std::vector<double> row_of(ConstValues m, int64 i) {
  std::vector<double> row(at(m.cols));
  for (int64 j = 0; j < m.cols; ++j) row[at(j)] = m.get(i, j);
  return row;
}

double log_sum_exp(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

// Softmax or sigmoid of a row of logits.
std::vector<double> scores_of(const Router& r, std::vector<double> x) {
  const double lse = r.score == Score::Softmax ? log_sum_exp(x) : 0;
  for (double& v : x) v = r.score == Score::Softmax ? std::exp(v - lse) : sigmoid(v);
  return x;
}

// Gradient of the logits from that of the scores p (dp in, dlogits out).
void scores_backward(const Router& r, const std::vector<double>& logits,
                     const std::vector<double>& p, std::vector<double>& dp) {
  if (r.score == Score::Sigmoid) {
    for (std::size_t e = 0; e < p.size(); ++e) dp[e] *= p[e] * sigmoid(-logits[e]);
    return;
  }
  const double dot = std::inner_product(p.begin(), p.end(), dp.begin(), 0.0);
  for (std::size_t e = 0; e < p.size(); ++e) dp[e] = p[e] * (dp[e] - dot);
}

void check_router(const Router& r, ConstValues logits) {
  if (r.top_k < 1 || r.top_k > r.experts)
    throw Error(ErrorCode::Config, "top_k is " + std::to_string(r.top_k) + " with " +
                                       std::to_string(r.experts) +
                                       " experts; 1 to experts is legal");
  expect_shape(logits, logits.rows, r.experts, "router logits");
}

// The chosen experts of one row, best first; equal logits by lowest index.
void choose(const Router& r, int64 t, const std::vector<double>& logits,
            std::vector<int64>& order) {
  if (r.balanced) {
    for (int64 j = 0; j < r.top_k; ++j) order[at(j)] = (r.first_slot + t * r.top_k + j) % r.experts;
    return;
  }
  std::iota(order.begin(), order.end(), int64{0});
  std::partial_sort(order.begin(), order.begin() + r.top_k, order.end(), [&](int64 a, int64 b) {
    return logits[at(a)] != logits[at(b)] ? logits[at(a)] > logits[at(b)] : a < b;
  });
}

// Sum of the chosen scores. Megatron-LM adds 1e-20 for sigmoid scores, which can all vanish.
double chosen_sum(const Router& r, const std::vector<double>& p, ConstValues index, int64 t) {
  double sum = r.score == Score::Sigmoid ? 1e-20 : 0;
  for (int64 j = 0; j < r.top_k; ++j) sum += p[at(static_cast<int64>(index.get(t, j)))];
  return sum;
}

} // namespace

void route_forward(const Router& r, ConstValues logits, Values index, Values weight,
                   Values scores) {
  check_router(r, logits);
  expect_shape(index, logits.rows, r.top_k, "expert index");
  expect_shape(weight, logits.rows, r.top_k, "expert weight");
  expect_shape(scores, logits.rows, r.experts, "router scores");
  std::vector<int64> order(at(r.experts));
  for (int64 t = 0; t < logits.rows; ++t) {
    const auto x = row_of(logits, t);
    const auto p = scores_of(r, x);
    choose(r, t, x, order);
    for (int64 j = 0; j < r.top_k; ++j) index.set(t, j, static_cast<double>(order[at(j)]));
    const double sum = r.renormalise ? chosen_sum(r, p, index, t) : 1;
    for (int64 j = 0; j < r.top_k; ++j) weight.set(t, j, p[at(order[at(j)])] / sum);
    for (int64 e = 0; scores && e < r.experts; ++e) scores.set(t, e, p[at(e)]);
  }
}

void route_backward(const Router& r, ConstValues logits, ConstValues index, ConstValues dweight,
                    ValuesGrad dlogits) {
  check_router(r, logits);
  expect_shape(index, logits.rows, r.top_k, "expert index");
  expect_shape(dweight, logits.rows, r.top_k, "expert weight gradient");
  expect_shape(dlogits, logits.rows, r.experts, "router logit gradient");
  for (int64 t = 0; t < logits.rows; ++t) {
    const auto x = row_of(logits, t);
    const auto p = scores_of(r, x);
    const double sum = r.renormalise ? chosen_sum(r, p, index, t) : 1;
    double mean = 0; // sum over the chosen of weight * dweight
    for (int64 j = 0; r.renormalise && j < r.top_k; ++j)
      mean += p[at(static_cast<int64>(index.get(t, j)))] / sum * dweight.get(t, j);
    std::vector<double> d(x.size());
    for (int64 j = 0; j < r.top_k; ++j)
      d[at(static_cast<int64>(index.get(t, j)))] = (dweight.get(t, j) - mean) / sum;
    if (r.renormalise && r.score == Score::Softmax) {
      // Softmax over the chosen logits: the others get exactly 0.
      for (std::size_t e = 0; e < d.size(); ++e) d[e] *= p[e];
    } else {
      scores_backward(r, x, p, d);
    }
    for (int64 e = 0; e < r.experts; ++e) dlogits.put(t, e, d[at(e)]);
  }
}

void dense_from_slots(ConstValues index, ConstValues weight, Values probs, Values map) {
  for (int64 t = 0; t < index.rows; ++t) {
    for (int64 e = 0; probs && e < probs.cols; ++e) probs.set(t, e, 0);
    for (int64 e = 0; map && e < map.cols; ++e) map.set(t, e, 0);
    for (int64 j = 0; j < index.cols; ++j) {
      const auto e = static_cast<int64>(index.get(t, j));
      if (probs) probs.set(t, e, weight.get(t, j));
      if (map) map.set(t, e, 1);
    }
  }
}

void slots_from_dense(ConstValues index, ConstValues probs, Values weight) {
  for (int64 t = 0; t < index.rows; ++t)
    for (int64 j = 0; j < index.cols; ++j)
      weight.set(t, j, probs.get(t, static_cast<int64>(index.get(t, j))));
}

std::vector<int64> expert_counts(int64 experts, ConstValues index) {
  std::vector<int64> counts(at(experts));
  for (int64 t = 0; t < index.rows; ++t)
    for (int64 j = 0; j < index.cols; ++j) ++counts[at(static_cast<int64>(index.get(t, j)))];
  return counts;
}

namespace {
double balance_factor(const Router& r, const BalanceLoss& loss) {
  const auto n = static_cast<double>(loss.tokens);
  return n > 0 ? loss.coef * static_cast<double>(r.experts) / (loss.kappa * n * n) : 0;
}
} // namespace

double balance_loss(const Router& r, const BalanceLoss& loss, ConstValues logits,
                    std::span<const int64> counts) {
  double sum = 0;
  for (int64 t = 0; t < logits.rows; ++t) {
    const auto p = scores_of(r, row_of(logits, t));
    for (int64 e = 0; e < r.experts; ++e) sum += static_cast<double>(counts[at(e)]) * p[at(e)];
  }
  return balance_factor(r, loss) * sum;
}

void balance_loss_backward(const Router& r, const BalanceLoss& loss, ConstValues logits,
                           std::span<const int64> counts, double upstream, ValuesGrad dlogits) {
  const double factor = upstream * balance_factor(r, loss);
  for (int64 t = 0; t < logits.rows; ++t) {
    const auto x = row_of(logits, t);
    const auto p = scores_of(r, x);
    std::vector<double> d(counts.begin(), counts.end());
    scores_backward(r, x, p, d);
    for (int64 e = 0; e < r.experts; ++e) dlogits.put(t, e, factor * d[at(e)]);
  }
}

double z_loss(double coef, ConstValues logits) {
  double sum = 0;
  for (int64 t = 0; t < logits.rows; ++t) {
    const double lse = log_sum_exp(row_of(logits, t));
    sum += lse * lse;
  }
  return logits.rows ? coef * sum / static_cast<double>(logits.rows) : 0;
}

void z_loss_backward(double coef, ConstValues logits, double upstream, ValuesGrad dlogits) {
  for (int64 t = 0; t < logits.rows; ++t) {
    const auto x = row_of(logits, t);
    const double lse = log_sum_exp(x);
    const double factor = upstream * coef * 2 * lse / static_cast<double>(logits.rows);
    for (int64 e = 0; e < logits.cols; ++e) dlogits.put(t, e, factor * std::exp(x[at(e)] - lse));
  }
}

} // namespace gdn::reference
