#include "trainer/bench/rule.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include <fmt/core.h>

#include "reference/random.h"
#include "reference/rule.h"
#include "trainer/telemetry.h"

namespace gdn::trainer::bench {

namespace {

std::vector<std::int64_t> ragged(std::int64_t total, std::size_t count) {
  const reference::RandomStream random{.seed = 11};
  std::vector<double> weight(count);
  for (std::size_t i = 0; i < count; ++i) weight[i] = std::exp(random.normal(i));
  const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);
  std::vector<std::int64_t> lengths;
  for (double w : weight) lengths.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(total) * w / sum)));
  lengths[0] += total - std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  return lengths;
}

std::vector<float> drawn(std::size_t count, std::uint64_t seed, double (*value)(double)) {
  const reference::RandomStream random{.seed = seed};
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(value(random.normal(i)));
  return out;
}

double seconds_of(const std::function<void()>& work, int repeats) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return quantiles(seconds).median;
}

} // namespace

std::int64_t RuleCase::tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }
double RuleCase::millions() const { return static_cast<double>(tokens()) * value_heads / (1 << 20); }

std::vector<RuleCase> rule_cases() {
  const std::int64_t n = 32768;
  std::vector<RuleCase> out;
  for (const int value_heads : {64, 32}) {
    out.push_back({"1 x 32768", 16, value_heads, {n}});
    out.push_back({"4 x 8192", 16, value_heads, std::vector<std::int64_t>(4, n / 4)});
    out.push_back({"4 documents", 16, value_heads, ragged(n, 4)});
    out.push_back({"32 x 1024", 16, value_heads, std::vector<std::int64_t>(32, n / 32)});
    out.push_back({"32 documents", 16, value_heads, ragged(n, 32)});
  }
  out.push_back({"1 x 32768", 2, 4, {n}});
  return out;
}

std::vector<RuleCase> shortened(std::vector<RuleCase> cases, std::int64_t divisor) {
  for (RuleCase& c : cases) {
    for (std::int64_t& l : c.lengths) l = std::max<std::int64_t>(1, l / divisor);
    c.name += fmt::format(" / {}", divisor);
  }
  return cases;
}

Seconds rule_floor(const RuleCase& c, bool backward, BytesPerSecond bandwidth) {
  const double group = static_cast<double>(c.value_heads) / c.key_heads;
  const double bytes = backward ? 4744 + 2304 / group : 1088 + 1024 / group;
  return bytes * static_cast<double>(c.tokens()) * c.value_heads / bandwidth;
}

std::vector<RuleTime> time_rule_on_cpu(const std::vector<RuleCase>& cases, int repeats, const RuleProgress& done) {
  using reference::Mat;
  std::vector<RuleTime> out;
  for (const RuleCase& c : cases) {
    const std::int64_t n = c.tokens(), keys = std::int64_t{c.key_heads} * kRuleDim, values = std::int64_t{c.value_heads} * kRuleDim, heads = c.value_heads;
    std::vector<std::int64_t> sequences{0};
    for (std::int64_t l : c.lengths) sequences.push_back(sequences.back() + l);
    const auto normal = [](double x) { return x; };
    const auto size = [n](std::int64_t cols) { return static_cast<std::size_t>(n * cols); };
    const auto q = drawn(size(keys), 1, normal), k = drawn(size(keys), 2, normal), v = drawn(size(values), 3, normal), d_o = drawn(size(values), 4, normal);
    const auto g = drawn(size(heads), 5, [](double x) { return -std::min(3.0, x * x); });
    const auto beta = drawn(size(heads), 6, [](double x) { return 1 / (1 + std::exp(-x)); });
    std::vector<float> o(v.size()), dq(q.size()), dk(k.size()), dv(v.size()), dg(g.size()), dbeta(g.size());
    const reference::RuleShape shape{.key_heads = c.key_heads, .value_heads = heads, .key_dim = kRuleDim, .value_dim = kRuleDim, .l2norm = true};
    auto in = [n](const std::vector<float>& x) { return Mat<const float>(x.data(), n, static_cast<std::int64_t>(x.size()) / n); };
    auto to = [n](std::vector<float>& x) { return Mat<float>(x.data(), n, static_cast<std::int64_t>(x.size()) / n); };
    RuleTime t{.shape = c};
    t.forward = seconds_of([&] {
      reference::RuleForward<float> p;
      p.q = in(q), p.k = in(k), p.v = in(v), p.g = in(g), p.beta = in(beta), p.o = to(o);
      reference::rule_chunk_forward<float>(shape, sequences, p);
    }, repeats);
    t.backward = seconds_of([&] {
      reference::RuleBackward<float> p;
      p.q = in(q), p.k = in(k), p.v = in(v), p.g = in(g), p.beta = in(beta), p.d_o = in(d_o);
      p.dq = to(dq), p.dk = to(dk), p.dv = to(dv), p.dg = to(dg), p.dbeta = to(dbeta);
      reference::rule_chunk_backward<float>(shape, sequences, p);
    }, repeats);
    out.push_back(t);
    done(t);
  }
  return out;
}

} // namespace gdn::trainer::bench
