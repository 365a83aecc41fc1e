// The oracle's adjoint against central differences of its own forward, on every input element, and
// the rounded chunk form against the oracle. No GPU.
#include <algorithm>
#include <cstdio>
#include <random>

#include "tests/gpu/rule_rounded.h"

using namespace gdn::gpu_test;

namespace {

// A fixed random linear functional of o and the final state.
double loss(const RuleProblem& p, const RuleResult& r) {
  double sum = 0;
  for (std::size_t i = 0; i < r.o.size(); ++i) sum += r.o[i] * p.d_o[i];
  for (std::size_t i = 0; i < r.final_state.size(); ++i) sum += r.final_state[i] * p.d_final[i];
  return sum;
}

} // namespace

int main() {
  RuleProblem p;
  p.lengths = {3, 0, 70};
  p.padding = 1;
  p.key_heads = 1;
  p.group = 2;
  p.key_dim = 3;
  p.value_dim = 2;
  p.scale = 0.7;
  p.epsilon = 1e-2;
  p.l2_norm = true;
  std::mt19937_64 generator(3);
  std::normal_distribution<double> normal;
  auto fill = [&](std::vector<double>& x, std::size_t count) {
    x.resize(count);
    for (auto& y : x) y = normal(generator);
  };
  const std::size_t n = p.tokens(), states = 3 * 2 * 3 * 2;
  fill(p.q, n * 3);
  fill(p.k, n * 3);
  fill(p.v, n * 4);
  fill(p.d_o, n * 4);
  fill(p.g, n * 2);
  fill(p.beta, n * 2);
  for (auto& x : p.g) x = -0.3 * x * x;
  for (auto& x : p.beta) x = 1 / (1 + std::exp(-x));
  fill(p.initial, states);
  fill(p.d_final, states);
  for (std::size_t i = (n - 1) * 4; i < n * 4; ++i) p.d_o[i] = 0; // the padding row

  const RuleResult r = rule_oracle(p);
  double worst = 0;
  auto compare = [&](const char* name, std::vector<double>& x, const std::vector<double>& d) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double kept = x[i], h = 1e-4;
      auto at = [&](double y) {
        x[i] = y;
        return loss(p, rule_oracle(p));
      };
      const double slope =
          (8 * (at(kept + h) - at(kept - h)) - (at(kept + 2 * h) - at(kept - 2 * h))) / (12 * h);
      x[i] = kept;
      error = std::max(error, std::abs(slope - d[i]));
      size = std::max(size, std::abs(d[i]));
    }
    std::printf("%-8s %.1e of %.1e\n", name, error, size);
    worst = std::max(worst, error / size);
  };
  compare("dq", p.q, r.dq);
  compare("dk", p.k, r.dk);
  compare("dv", p.v, r.dv);
  compare("dg", p.g, r.dg);
  compare("dbeta", p.beta, r.dbeta);
  compare("dS_init", p.initial, r.d_initial);
  if (!(worst < 1e-8)) return 5;

  // bf16 operands cost 2^-9 to 2^-7 on well-conditioned input: neither exact nor worse.
  p.key_dim = p.value_dim = 16;
  p.lengths = {130};
  p.padding = 0;
  for (auto* x : {&p.q, &p.k, &p.v, &p.d_o}) {
    fill(*x, 130 * 2 * 16);
    for (auto& y : *x) y = value(to_bf16(static_cast<float>(y)));
  }
  fill(p.g, 130 * 2);
  fill(p.beta, 130 * 2);
  for (auto& x : p.g) x = -0.3 * x * x;
  for (auto& x : p.beta) x = 1 / (1 + std::exp(-x));
  fill(p.initial, 2 * 16 * 16);
  fill(p.d_final, 2 * 16 * 16);
  const RuleResult exact = rule_oracle(p), rounded = rule_rounded(p);
  bool ok = true;
  auto close = [&](const char* name, std::vector<double> RuleResult::*field) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < (exact.*field).size(); ++i) {
      error += std::pow((exact.*field)[i] - (rounded.*field)[i], 2);
      size += std::pow((exact.*field)[i], 2);
    }
    const double relative = std::sqrt(error / size);
    std::printf("rounded %-8s %.1e\n", name, relative);
    ok = ok && relative > 5e-4 && relative < 8e-3;
  };
  close("o", &RuleResult::o);
  close("S", &RuleResult::final_state);
  close("dq", &RuleResult::dq);
  close("dk", &RuleResult::dk);
  close("dv", &RuleResult::dv);
  close("dg", &RuleResult::dg);
  close("dbeta", &RuleResult::dbeta);
  close("dS_init", &RuleResult::d_initial);
  return ok ? 0 : 5;
}
