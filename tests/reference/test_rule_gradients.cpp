#include "rule_case.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

// The loss is always the recurrence's: the definition.
void check_gradients(RuleCase<double> c, Form form, std::size_t samples) {
  c.run(form);
  auto work = c;
  auto loss = [&] {
    rule_recurrent_forward<double>(c.shape, c.cu, work.forward_args());
    return dot(c.d_o, work.o) + (c.with_states ? dot(c.d_final, work.final) : 0);
  };
  CHECK(gradient_error(work.q, c.dq, loss, samples) < kNumericGradient);
  CHECK(gradient_error(work.k, c.dk, loss, samples) < kNumericGradient);
  CHECK(gradient_error(work.v, c.dv, loss, samples) < kNumericGradient);
  CHECK(gradient_error(work.g, c.dg, loss, samples) < kNumericGradient);
  CHECK(gradient_error(work.beta, c.dbeta, loss, samples) < kNumericGradient);
  if (c.with_states)
    CHECK(gradient_error(work.initial, c.d_initial, loss, samples) < kNumericGradient);
}

} // namespace

TEST_CASE("gradients of both forms against central differences") {
  for (const auto form : {Form::Recurrent, Form::Chunked})
    for (const int64 repeat : {1, 2, 3, 4})
      for (const auto decay : {Decay::Zero, Decay::Slight, Decay::One, Decay::Squares}) {
        CAPTURE(static_cast<int>(form));
        CAPTURE(repeat);
        RuleCase<double> c(shape_of(1, repeat, 5, 4), offsets({3, 0, 17, 1}));
        c.set(decay);
        check_gradients(c.normalise(), form, 60);
      }
}

TEST_CASE("gradients across chunks, through the L2 norm inside, without states") {
  for (const bool states : {true, false}) {
    RuleCase<double> c(shape_of(1, 2, 6, 7, true), offsets({130, 63}));
    c.set(Decay::Squares);
    c.set(Strength::Double);
    c.with_states = states;
    check_gradients(c, Form::Chunked, 24);
  }
}

TEST_CASE("the L2 norm inside equals the norm outside") {
  RuleCase<double> inside(shape_of(2, 2, 6, 5, true), offsets({70, 9}));
  inside.run(Form::Chunked);
  auto outside = inside;
  outside.shape.l2norm = false;
  Tensor<double> q_rstd(79, 2), k_rstd(79, 2);
  l2norm_forward<double>(6, inside.q, outside.q, q_rstd);
  l2norm_forward<double>(6, inside.k, outside.k, k_rstd);
  outside.run(Form::Chunked);
  CHECK(same_bits(inside.o, outside.o));
  Tensor<double> dq(79, 12), dk(79, 12);
  l2norm_backward<double>(6, outside.q, q_rstd, outside.dq, dq);
  l2norm_backward<double>(6, outside.k, k_rstd, outside.dk, dk);
  CHECK(same_bits(inside.dq, dq));
  CHECK(same_bits(inside.dk, dk));
}

TEST_CASE("gradients accumulate on demand") {
  RuleCase<double> c(shape_of(1, 2, 4, 3), offsets({70}));
  c.run(Form::Chunked);
  auto twice = c;
  auto p = twice.backward_args();
  p.dq.write = p.dk.write = p.dv.write = p.dg.write = p.dbeta.write = Write::Accumulate;
  rule_chunk_backward<double>(c.shape, c.cu, p);
  for (std::size_t i = 0; i < c.dq.data.size(); ++i) CHECK(twice.dq.data[i] == 2 * c.dq.data[i]);
  for (std::size_t i = 0; i < c.dv.data.size(); ++i) CHECK(twice.dv.data[i] == 2 * c.dv.data[i]);
  for (std::size_t i = 0; i < c.dg.data.size(); ++i) CHECK(twice.dg.data[i] == 2 * c.dg.data[i]);
}
