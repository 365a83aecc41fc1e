#include "reference/rule_rounded.h"
#include "rule_case.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

// The table of the expected errors; columns o, S_final, dq, dk, dv, dbeta, dS_init.
struct ExpectedRow {
  const char* name;
  Decay decay;
  Strength strength;
  Keys keys;
  double g; // constant, where not 0
  double expected[7];
};
const ExpectedRow kExpected[] = {
    {"g = 0", Decay::Zero, Strength::Half, Keys::Random, 0, {4.2, 3.8, 4.3, 4.6, 3.5, 3.8, 2.2}},
    {"g = -0.05", Decay::Zero, Strength::Half, Keys::Random, -0.05, {3.8, 3.4, 3.7, 3.7, 3.1, 2.5, 1.7}},
    {"g = -3u^2", Decay::Squares, Strength::Half, Keys::Random, 0, {3.2, 3.0, 3.3, 3.3, 2.8, 2.3, 1.7}},
    {"g = -20", Decay::Strong, Strength::Half, Keys::Random, 0, {3.2, 3.3, 3.0, 3.2, 2.9, 2.3, 1.7}},
    {"mixed", Decay::Mixed, Strength::Half, Keys::Random, 0, {3.3, 2.9, 3.3, 3.3, 2.9, 2.6, 1.6}},
    {"beta to 2", Decay::Zero, Strength::Double, Keys::Random, 0, {5.5, 5.7, 5.6, 6.7, 4.6, 6.3, 4.7}},
    {"identical keys, beta near 1", Decay::Zero, Strength::One, Keys::Identical, 0, {12, 19, 14, 4.4, 19, 24, 0.3}}};

RuleCase<bf16> expected_case(const ExpectedRow& row) {
  RuleCase<bf16> c(shape_of(1, 1, 128, 128), offsets({512}));
  c.set(row.decay);
  c.set(row.strength);
  c.set(row.keys);
  if (row.g != 0) c.g.fill(row.g);
  if (row.keys == Keys::Identical) c.beta.uniform(0.99, 1);
  return c.normalise();
}

} // namespace

// With identical keys the table's inverse was merged in bf16; an exact one is better.
TEST_CASE("the arithmetic of a sound bf16 kernel has the errors of the table") {
  for (const ExpectedRow& row : kExpected) {
    CAPTURE(row.name);
    const RuleCase<bf16> inputs = expected_case(row);
    auto exact = inputs.exact(), rounded = inputs.exact();
    exact.run(Form::Recurrent);
    rule_rounded_forward(rounded.shape, rounded.cu, rounded.forward_args());
    rule_rounded_backward(rounded.shape, rounded.cu, rounded.backward_args());
    const double errors[] = {l2_error(rounded.o, exact.o), l2_error(rounded.final, exact.final), l2_error(rounded.dq, exact.dq), l2_error(rounded.dk, exact.dk),
                             l2_error(rounded.dv, exact.dv), l2_error(rounded.dbeta, exact.dbeta), l2_error(rounded.d_initial, exact.d_initial)};
    for (int i = 0; i < 7; ++i) {
      CAPTURE(i);
      const bool state = i == 1 || i == 6; // of one sequence: few numbers
      CHECK(1e3 * errors[i] < (state ? 2 : 1.5) * row.expected[i]);
      if (row.keys == Keys::Random) CHECK(1e3 * errors[i] > 0.3 * row.expected[i]);
    }
  }
}

TEST_CASE("bf16 storage stays within twice the expected errors of a bf16 kernel") {
  // Relative L2 against the recurrence in double on the same bf16 inputs, unit 1e-3; 512 tokens, dk = dv = 128.
  for (const ExpectedRow& row : kExpected) {
    CAPTURE(row.name);
    RuleCase<bf16> c = expected_case(row);
    auto exact = c.exact();
    exact.run(Form::Recurrent);
    c.run(Form::Chunked);
    const double unit = 2e-3;
    CHECK(l2_error(c.o, exact.o) < unit * row.expected[0]);
    CHECK(l2_error(c.final, exact.final) < unit * row.expected[1]);
    CHECK(l2_error(c.dq, exact.dq) < unit * row.expected[2]);
    CHECK(l2_error(c.dk, exact.dk) < unit * row.expected[3]);
    CHECK(l2_error(c.dv, exact.dv) < unit * row.expected[4]);
    CHECK(l2_error(c.dbeta, exact.dbeta) < unit * row.expected[5]);
    CHECK(l2_error(c.d_initial, exact.d_initial) < unit * row.expected[6]);
    std::vector<double> relative;
    for (std::size_t i = 0; i < exact.dg.data.size(); ++i)
      if (std::abs(exact.dg.data[i]) > 1e-30)
        relative.push_back(std::abs(c.dg.data[i] / exact.dg.data[i] - 1));
    std::sort(relative.begin(), relative.end());
    if (!relative.empty()) CHECK(relative[relative.size() * 9 / 10] < 5e-2);
  }
}

TEST_CASE("gate extremes are finite: 1e-5 in fp32, 2e-2 in bf16") {
  for (const int64 d : {64, 128})
    for (int kind = 0; kind < 6; ++kind) {
      CAPTURE(d);
      CAPTURE(kind);
      RuleCase<bf16> c(shape_of(2, 1, d, d, true), offsets({192}));
      c.set(kind == 1 ? Decay::Strong : Decay::Zero);
      if (kind == 2)
        for (int64 h = 0; h < 2; ++h) c.g(100, h) = -200;
      if (kind == 3) c.set(Keys::ZeroRows);
      if (kind == 4) c.set(Strength::Zero);
      if (kind == 5) c.set(Strength::One);
      c.with_states = false;
      auto exact = c.exact();
      exact.run(Form::Recurrent);
      RuleCase<float> single(c.shape, c.cu);
      single.q = c.q.to<float>(), single.k = c.k.to<float>(), single.v = c.v.to<float>();
      single.d_o = c.d_o.to<float>(), single.g = c.g, single.beta = c.beta;
      single.with_states = false;
      single.run(Form::Chunked);
      c.run(Form::Chunked);
      CHECK(max_error(single.o, exact.o) < 1e-5);
      CHECK(max_error(single.dq, exact.dq) < 1e-5);
      CHECK(max_error(single.dk, exact.dk) < 1e-5);
      CHECK(max_error(single.dv, exact.dv) < 1e-5);
      CHECK(max_error(single.dg, exact.dg) < 1e-5);
      CHECK(max_error(single.dbeta, exact.dbeta) < 1e-5);
      CHECK(max_error(c.o, exact.o) < 2e-2);
      CHECK(max_error(c.dq, exact.dq) < 2e-2);
      CHECK(max_error(c.dk, exact.dk) < 2e-2);
      CHECK(max_error(c.dv, exact.dv) < 2e-2);
      CHECK(max_error(c.dg, exact.dg) < 2e-2);
      CHECK(max_error(c.dbeta, exact.dbeta) < 2e-2);
    }
}

TEST_CASE_TEMPLATE("one pass, the token loop, and one pass plus a step agree", T, float, bf16) {
  const double tolerance = std::is_same_v<T, float> ? 1e-5 : 2e-2;
  for (const int64 length : {1, 63, 64, 65, 127, 129}) {
    CAPTURE(length);
    RuleCase<T> c(shape_of(1, 2, 32, 24, true), {0, length});
    c.set(Decay::Squares);
    c.run(Form::Chunked);
    auto loop = c;
    loop.run(Form::Recurrent);
    auto largest = [](const auto& a, const auto& b) {
      double d = 0;
      for (std::size_t i = 0; i < a.data.size(); ++i)
        d = std::max(d, std::abs(static_cast<double>(a.data[i]) - static_cast<double>(b.data[i])));
      return d;
    };
    CHECK(largest(c.o, loop.o) <= tolerance);
    CHECK(largest(c.final, loop.final) <= tolerance);

    auto shorter = c; // all tokens but the last, then one step
    shorter.cu = {0, length - 1};
    rule_chunk_forward<T>(shorter.shape, shorter.cu, shorter.forward_args());
    auto last = [&](auto& m) { return m.view().row_range(length - 1, 1); };
    RuleForward<T> step;
    step.q = last(c.q), step.k = last(c.k), step.v = last(c.v);
    step.g = last(c.g), step.beta = last(c.beta);
    Tensor<T> o(1, c.o.cols);
    step.o = o;
    // The state lies in slot 2 of a pool.
    Tensor<float> pool(3 * 2 * 32, 24);
    std::copy(shorter.final.data.begin(), shorter.final.data.end(),
              pool.data.begin() + 2 * 2 * 32 * 24);
    const std::vector<int64> slots{2};
    rule_step<T>(c.shape, step, slots, pool);
    for (int64 j = 0; j < o.cols; ++j)
      CHECK(std::abs(static_cast<double>(o(0, j)) - static_cast<double>(c.o(length - 1, j))) <=
            tolerance);
    for (int64 i = 0; i < 64; ++i)
      for (int64 j = 0; j < 24; ++j)
        CHECK(std::abs(pool(2 * 64 + i, j) - c.final(i, j)) <= tolerance);
  }
}

TEST_CASE("many short sequences, and one of a hundred thousand tokens") {
  std::vector<int64> short_ones, tiny;
  for (int64 i = 0; i < 1024; ++i) short_ones.push_back(1 + i % 8);
  for (int64 i = 0; i < 70000; ++i) tiny.push_back(i % 7 == 0);
  for (const auto& lengths : {short_ones, tiny, std::vector<int64>{100000}}) {
    RuleCase<float> c(shape_of(1, 1, 4, 4, true), offsets(lengths));
    c.set(Decay::Squares);
    auto exact = c.exact();
    rule_recurrent_forward<double>(exact.shape, exact.cu, exact.forward_args());
    rule_chunk_forward<float>(c.shape, c.cu, c.forward_args());
    CHECK(max_error(c.o, exact.o) < 1e-5);
    CHECK(max_error(c.final, exact.final) < 1e-5);
  }
}
