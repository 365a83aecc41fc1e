#include "core/error.h"
#include "rule_case.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

// Accepted of an oracle in double: 1e-12 forward, 1e-11 for gradients. dg agrees in nearly every
// element, also where strong decay makes it tiny: digits go only where beta = 1 and repeated keys
// erase what they wrote, in either form.
void compare(RuleCase<double>& c) {
  auto r = c;
  r.run(Form::Recurrent);
  c.run(Form::Chunked);
  CHECK(max_error(c.o, r.o) < 1e-12);
  CHECK(max_error(c.final, r.final) < 1e-12);
  CHECK(max_error(c.dq, r.dq) < 1e-11);
  CHECK(max_error(c.dk, r.dk) < 1e-11);
  CHECK(max_error(c.dv, r.dv) < 1e-11);
  CHECK(max_error(c.dg, r.dg) < 1e-11);
  CHECK(max_error(c.dbeta, r.dbeta) < 1e-11);
  CHECK(max_error(c.d_initial, r.d_initial) < 1e-11);
  std::vector<double> relative;
  for (std::size_t i = 0; i < r.dg.data.size(); ++i)
    if (std::abs(r.dg.data[i]) > 1e-30)
      relative.push_back(std::abs(c.dg.data[i] / r.dg.data[i] - 1));
  std::sort(relative.begin(), relative.end());
  if (!relative.empty()) CHECK(relative[relative.size() * 9 / 10] < 1e-5);
}

} // namespace

TEST_CASE("the recurrence is the matrix form of its definition") {
  // S_t = e^g (I - beta k k^T) S_{t-1} + beta k v^T, o_t = s S_t^T q_t, with dk != dv.
  RuleCase<double> c(shape_of(1, 2, 3, 5), offsets({6, 4}));
  c.set(Decay::One);
  c.normalise().run(Form::Recurrent);
  const int64 dk = 3, dv = 5;
  for (int64 s = 0; s < 2; ++s)
    for (int64 h = 0; h < 2; ++h) {
      double S[3][5];
      for (int64 i = 0; i < dk; ++i)
        for (int64 j = 0; j < dv; ++j) S[i][j] = c.initial((s * 2 + h) * dk + i, j);
      for (int64 t = c.cu[std::size_t(s)]; t < c.cu[std::size_t(s) + 1]; ++t) {
        double next[3][5] = {};
        for (int64 i = 0; i < dk; ++i)
          for (int64 j = 0; j < dv; ++j) {
            for (int64 l = 0; l < dk; ++l)
              next[i][j] += std::exp(c.g(t, h)) *
                            ((i == l ? 1 : 0) - c.beta(t, h) * c.k(t, i) * c.k(t, l)) * S[l][j];
            next[i][j] += c.beta(t, h) * c.k(t, i) * c.v(t, h * dv + j);
          }
        std::memcpy(S, next, sizeof(S));
        for (int64 j = 0; j < dv; ++j) {
          double o = 0;
          for (int64 i = 0; i < dk; ++i) o += S[i][j] * c.q(t, i) / std::sqrt(3.0);
          CHECK(c.o(t, h * dv + j) == doctest::Approx(o).epsilon(1e-12));
        }
      }
      for (int64 i = 0; i < dk; ++i)
        for (int64 j = 0; j < dv; ++j)
          CHECK(c.final((s * 2 + h) * dk + i, j) == doctest::Approx(S[i][j]).epsilon(1e-12));
    }
}

TEST_CASE("chunked equals recurrent: lengths and heads") {
  for (const int64 length : {1, 2, 3, 4, 63, 64, 65, 127, 128, 129})
    for (const int64 repeat : {1, 2, 3, 4}) {
      CAPTURE(length);
      CAPTURE(repeat);
      RuleCase<double> c(shape_of(1, repeat, 7, 5), {0, length});
      compare(c.normalise());
    }
  RuleCase<double> packed(shape_of(2, 2, 6, 9), offsets({0, 1, 63, 64, 65, 0, 200, 0}));
  compare(packed.normalise());
  RuleCase<double> wide(shape_of(16, 1, 4, 6), offsets({70, 3}));
  compare(wide.normalise());
}

TEST_CASE("chunked equals recurrent: every decay with every strength and every kind of keys") {
  for (const auto decay : {Decay::Zero, Decay::Slight, Decay::One, Decay::Strong, Decay::Underflow,
                           Decay::Mixed, Decay::OneHuge})
    for (const auto strength : {Strength::Zero, Strength::Tiny, Strength::Half, Strength::One,
                                Strength::Double, Strength::Two})
      for (const auto keys : {Keys::Random, Keys::Identical, Keys::Alternating, Keys::Period4,
                              Keys::Cosine, Keys::ZeroRows, Keys::SmallRows}) {
        CAPTURE(static_cast<int>(decay));
        CAPTURE(static_cast<int>(strength));
        CAPTURE(static_cast<int>(keys));
        RuleCase<double> c(shape_of(1, 2, 8, 6, true), offsets({65, 3}));
        c.set(decay);
        c.set(strength);
        c.set(keys);
        compare(c);
      }
}

TEST_CASE("chunked equals recurrent: states, widths, long sequences") {
  for (const auto states : {States::Absent, States::Random, States::Huge})
    for (const auto decay : {Decay::Zero, Decay::Slight, Decay::Strong}) {
      RuleCase<double> c(shape_of(1, 2, 8, 6, true), offsets({129, 0, 2}));
      c.set(decay);
      c.set(states);
      compare(c);
    }
  RuleCase<double> only_states(shape_of(1, 2, 8, 6, true), offsets({100}));
  only_states.d_o.zero();
  compare(only_states);
  for (const auto [dk, dv] : {std::array<int64, 2>{128, 128}, {96, 192}, {64, 64}}) {
    RuleCase<double> c(shape_of(1, 2, dk, dv, true), offsets({130, 63}));
    compare(c);
  }
  RuleCase<double> grown(shape_of(1, 1, 12, 10, true), offsets({4096}));
  grown.set(Decay::Slight);
  compare(grown);
}

TEST_CASE("beta = 0 leaves the state alone apart from its decay") {
  RuleCase<double> c(shape_of(1, 1, 4, 4, true), offsets({130}));
  c.set(Decay::Slight);
  c.set(Strength::Zero);
  c.run(Form::Chunked);
  for (std::size_t i = 0; i < c.final.data.size(); ++i)
    CHECK(c.final.data[i] == doctest::Approx(std::exp(-0.130) * c.initial.data[i]).epsilon(1e-12));
}

TEST_CASE("an empty sequence passes its state and its gradient through") {
  RuleCase<double> c(shape_of(1, 2, 4, 3), offsets({5, 0, 7}));
  for (const auto form : {Form::Recurrent, Form::Chunked}) {
    c.run(form);
    for (int64 i = 8; i < 16; ++i)
      for (int64 j = 0; j < 3; ++j) {
        CHECK(c.final(i, j) == c.initial(i, j));
        CHECK(c.d_initial(i, j) == c.d_final(i, j));
      }
  }
}

TEST_CASE("shapes that cannot be are refused by name") {
  RuleCase<double> c(shape_of(2, 1, 4, 3), offsets({5}));
  c.shape.value_heads = 3;
  CHECK_THROWS_WITH_AS(c.run(Form::Chunked),
                       "gated delta rule with 2 key heads of 4 and 3 value heads of 3", gdn::Error);
}
