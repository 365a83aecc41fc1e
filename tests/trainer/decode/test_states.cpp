#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/conv.h"
#include "reference/init.h"
#include "reference/random.h"
#include "reference/rule.h"

// The two state-carrying functions of the reference, in double: cut anywhere, they are the whole.
using namespace gdn::reference;

namespace {

std::vector<double> drawn(int64 n, std::uint64_t op, double low = -1, double high = 1) {
  std::vector<double> v(static_cast<size_t>(n));
  fill_uniform(vector_view(std::span<double>(v)), low, high, {.seed = 3, .op = op});
  return v;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

} // namespace

TEST_CASE("conv_continue: cut anywhere, the same outputs and the state of the last tokens") {
  constexpr int64 kTokens = 11, kChannels = 3, kTaps = 4;
  std::vector<double> x = drawn(kTokens * kChannels, 1), w = drawn(kChannels * kTaps, 2), whole(x.size()), y(x.size());
  const Mat<double> in(x.data(), kTokens, kChannels), weight(w.data(), kChannels, kTaps), out(y.data(), kTokens, kChannels);
  const int64 all[] = {0, kTokens};
  conv_forward<double>(Activation::Silu, all, in, weight, {}, Mat<double>(whole.data(), kTokens, kChannels));
  for (int64 cut = 0; cut <= kTokens; ++cut) {
    std::vector<double> pool(3 * kChannels * kTaps, 0.0), expected(pool.size(), 0.0); // slot 2 of three
    const Mat<double> states(pool.data(), 3 * kChannels, kTaps);
    const int64 slot[] = {2};
    std::fill(y.begin(), y.end(), 0.0);
    const int64 first[] = {0, cut}, rest[] = {0, kTokens - cut};
    conv_continue<double>(Activation::Silu, first, in.row_range(0, cut), weight, {}, slot, states, out.row_range(0, cut));
    conv_continue<double>(Activation::Silu, rest, in.row_range(cut, kTokens - cut), weight, {}, slot, states, out.row_range(cut, kTokens - cut));
    CHECK(largest_difference(y, whole) < 1e-15);
    for (int64 c = 0; c < kChannels; ++c) // the last four inputs, newest last
      for (int64 k = 0; k < kTaps; ++k) expected[static_cast<size_t>((2 * kChannels + c) * kTaps + k)] = in(kTokens - kTaps + k, c);
    CHECK(pool == expected);
  }
}

TEST_CASE("conv_continue: packed requests of 0, 1 and 5 tokens in any slots are each alone") {
  constexpr int64 kChannels = 2, kTaps = 4;
  std::vector<double> x = drawn(6 * kChannels, 1), w = drawn(kChannels * kTaps, 2), y(x.size()), alone(x.size());
  const Mat<double> in(x.data(), 6, kChannels), weight(w.data(), kChannels, kTaps);
  std::vector<double> pool = drawn(4 * kChannels * kTaps, 3), separate = pool;
  const int64 offsets[] = {0, 0, 1, 6}, slots[] = {3, 0, 2};
  conv_continue<double>(Activation::None, offsets, in, weight, {}, slots, Mat<double>(pool.data(), 4 * kChannels, kTaps), Mat<double>(y.data(), 6, kChannels));
  for (size_t s : {2, 0, 1}) {
    const int64 n = offsets[s + 1] - offsets[s], own[] = {0, n};
    conv_continue<double>(Activation::None, own, in.row_range(offsets[s], n), weight, {}, std::span(slots).subspan(s, 1),
                          Mat<double>(separate.data(), 4 * kChannels, kTaps), Mat<double>(alone.data(), 6, kChannels).row_range(offsets[s], n));
  }
  CHECK(y == alone);
  CHECK(pool == separate);
}

TEST_CASE("rule_continue: cut anywhere around the chunk, the recurrence of the definition") {
  constexpr int64 kTokens = 130, kHeads = 2, kDk = 4, kDv = 3;
  RuleShape shape;
  shape.key_heads = 1;
  shape.value_heads = kHeads;
  shape.key_dim = kDk;
  shape.value_dim = kDv;
  shape.l2norm = true;
  std::vector<double> q = drawn(kTokens * kDk, 1), k = drawn(kTokens * kDk, 2), v = drawn(kTokens * kHeads * kDv, 3),
                      g = drawn(kTokens * kHeads, 4, -0.5, 0), beta = drawn(kTokens * kHeads, 5, 0, 1);
  std::vector<double> o(static_cast<size_t>(kTokens * kHeads * kDv)), expected(o.size()), final_state(kHeads * kDk * kDv);
  const std::vector<double> initial = drawn(kHeads * kDk * kDv, 6);
  auto part = [&](int64 first, int64 n, std::vector<double>& to) {
    RuleForward<double> p;
    p.q = Mat<double>(q.data(), kTokens, kDk).row_range(first, n);
    p.k = Mat<double>(k.data(), kTokens, kDk).row_range(first, n);
    p.v = Mat<double>(v.data(), kTokens, kHeads * kDv).row_range(first, n);
    p.g = Mat<double>(g.data(), kTokens, kHeads).row_range(first, n);
    p.beta = Mat<double>(beta.data(), kTokens, kHeads).row_range(first, n);
    p.o = Mat<double>(to.data(), kTokens, kHeads * kDv).row_range(first, n);
    return p;
  };
  RuleForward<double> definition = part(0, kTokens, expected);
  definition.initial_state = Mat<const double>(initial.data(), kHeads * kDk, kDv);
  definition.final_state = Mat<double>(final_state.data(), kHeads * kDk, kDv);
  const int64 all[] = {0, kTokens};
  rule_recurrent_forward<double>(shape, all, definition);
  for (int64 cut : {0, 1, 63, 64, 65, 127, 129, 130}) {
    std::vector<double> pool(3 * initial.size(), 7.0); // slot 1 of three
    std::copy(initial.begin(), initial.end(), pool.begin() + static_cast<std::ptrdiff_t>(initial.size()));
    const Mat<double> states(pool.data(), 3 * kHeads * kDk, kDv);
    const int64 slot[] = {1}, first[] = {0, cut}, rest[] = {0, kTokens - cut};
    rule_continue<double>(shape, first, part(0, cut, o), slot, states);
    rule_continue<double>(shape, rest, part(cut, kTokens - cut, o), slot, states);
    INFO("cut " << cut);
    CHECK(largest_difference(o, expected) < 1e-12);
    const std::vector<double> left(pool.begin() + static_cast<std::ptrdiff_t>(initial.size()), pool.begin() + 2 * static_cast<std::ptrdiff_t>(initial.size()));
    CHECK(largest_difference(left, final_state) < 1e-12);
    CHECK(pool.front() == 7.0); // other slots are left alone
    CHECK(pool.back() == 7.0);
  }
}
