#include "rule_case.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

// What must hold to the last bit.

TEST_CASE_TEMPLATE("packed equals each sequence alone", T, float, bf16) {
  const std::vector<int64> lengths{0, 1, 63, 64, 65, 0, 200, 0};
  RuleCase<T> c(shape_of(2, 2, 16, 12, true), offsets(lengths));
  c.run(Form::Chunked);
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    RuleCase<T> alone(c.shape, {0, lengths[s]});
    auto rows = [&](auto& to, const auto& from, int64 first) {
      std::copy_n(from.data.begin() + first * from.cols, to.data.size(), to.data.begin());
    };
    for (auto [to, from] :
         {std::pair{&alone.q, &c.q}, {&alone.k, &c.k}, {&alone.v, &c.v}, {&alone.d_o, &c.d_o}})
      rows(*to, *from, c.cu[s]);
    rows(alone.g, c.g, c.cu[s]);
    rows(alone.beta, c.beta, c.cu[s]);
    rows(alone.initial, c.initial, int64(s) * 4 * 16);
    rows(alone.d_final, c.d_final, int64(s) * 4 * 16);
    alone.run(Form::Chunked);
    auto same = [&](const auto& one, const auto& all, int64 first) {
      return std::memcmp(one.data.data(), all.data.data() + first * all.cols,
                         one.data.size() * sizeof(one.data[0])) == 0;
    };
    CHECK(same(alone.o, c.o, c.cu[s]));
    CHECK(same(alone.dq, c.dq, c.cu[s]));
    CHECK(same(alone.dk, c.dk, c.cu[s]));
    CHECK(same(alone.dv, c.dv, c.cu[s]));
    CHECK(same(alone.dg, c.dg, c.cu[s]));
    CHECK(same(alone.dbeta, c.dbeta, c.cu[s]));
    CHECK(same(alone.final, c.final, int64(s) * 4 * 16));
    CHECK(same(alone.d_initial, c.d_initial, int64(s) * 4 * 16));
  }
}

TEST_CASE("nothing depends on what follows: more tokens, or padding full of NaN") {
  RuleCase<float> longer(shape_of(1, 2, 16, 12, true), offsets({130}));
  longer.run(Form::Chunked);
  for (const int64 length : {1, 63, 64, 65, 127, 129}) {
    RuleCase<float> c = longer;
    c.cu = {0, length}; // the rest is padding
    for (auto* m : {&c.q, &c.k, &c.v, &c.d_o, &c.g, &c.beta})
      std::fill(m->data.begin() + length * m->cols, m->data.end(), std::nanf(""));
    c.run(Form::Chunked);
    for (int64 t = 0; t < length; ++t)
      for (int64 j = 0; j < c.o.cols; ++j) CHECK(c.o(t, j) == longer.o(t, j));
    for (int64 t = length; t < 130; ++t) {
      for (int64 j = 0; j < c.o.cols; ++j) CHECK(c.o(t, j) == 0);
      for (int64 j = 0; j < c.dq.cols; ++j) CHECK(c.dq(t, j) == 0);
      CHECK(c.dg(t, 0) == 0);
    }
    for (const auto* m : {&c.dq, &c.dk, &c.dv, &c.final, &c.d_initial})
      for (const float v : m->data) REQUIRE(std::isfinite(v));
  }
}

TEST_CASE_TEMPLATE("what the forward keeps and what the backward rebuilds are the same", T, float,
                   bf16) {
  RuleCase<T> c(shape_of(2, 2, 16, 12, true), offsets({70, 0, 130, 5}), 3);
  c.run(Form::Chunked);
  const int64 rows = c.q.rows;
  Tensor<float> g_cum(rows, 4), q_rstd(rows, 2), k_rstd(rows, 2);
  Tensor<T> inverse(rows, 4 * 64), q_norm(rows, 32), k_norm(rows, 32);
  Tensor<T> states(chunk_count(c.cu, 64) * 4 * 16, 12);
  auto kept = c;
  auto f = kept.forward_args();
  f.g_cum = g_cum, f.inverse = inverse, f.q_norm = q_norm, f.k_norm = k_norm;
  f.q_rstd = q_rstd, f.k_rstd = k_rstd, f.chunk_states = states;
  rule_chunk_forward<T>(c.shape, c.cu, f);
  CHECK(same_bits(kept.o, c.o));
  CHECK(same_bits(kept.final, c.final));
  // Chunk 0 starts from S_init; rows of the inverse are unit lower triangular; sums restart at 64.
  CHECK(states(3, 4) == static_cast<T>(c.initial(3, 4)));
  CHECK(static_cast<float>(inverse(5, 5)) == 1);
  CHECK(static_cast<float>(inverse(5, 6)) == 0);
  CHECK(g_cum(64, 1) == c.g(64, 1));
  CHECK(g_cum(1, 1) == c.g(0, 1) + c.g(1, 1));

  auto b = kept.backward_args();
  b.q = {}, b.k = {}, b.g = {};
  b.g_cum = g_cum, b.inverse = inverse, b.q_norm = q_norm, b.k_norm = k_norm;
  b.q_rstd = q_rstd, b.k_rstd = k_rstd, b.chunk_states = states;
  CHECK(rule_backward_scratch_bytes(c.shape, c.cu, sizeof(T), true) == 0);
  rule_chunk_backward<T>(c.shape, c.cu, b);
  CHECK(same_bits(kept.dq, c.dq));
  CHECK(same_bits(kept.dk, c.dk));
  CHECK(same_bits(kept.dv, c.dv));
  CHECK(same_bits(kept.dg, c.dg));
  CHECK(same_bits(kept.dbeta, c.dbeta));
  CHECK(same_bits(kept.d_initial, c.d_initial));

  SUBCASE("scratch of the stated size is enough, less is refused") {
    const auto bytes = rule_backward_scratch_bytes(c.shape, c.cu, sizeof(T), false);
    CHECK(bytes == 3 * 2 * 16 * 12 * int64(sizeof(T))); // the longest sequence has 3 chunks
    std::vector<T> scratch(std::size_t(bytes) / sizeof(T) + 1, T(77));
    auto again = c;
    auto p = again.backward_args();
    p.scratch = std::as_writable_bytes(std::span(scratch)).first(std::size_t(bytes));
    rule_chunk_backward<T>(c.shape, c.cu, p);
    CHECK(same_bits(again.dq, c.dq));
    CHECK(static_cast<float>(scratch.back()) == 77);
    p.scratch = p.scratch.first(std::size_t(bytes) - sizeof(T));
    CHECK_THROWS(rule_chunk_backward<T>(c.shape, c.cu, p));
  }
}

TEST_CASE("grouped value heads equal repeated query and key heads") {
  for (const int64 repeat : {2, 3, 4}) {
    RuleCase<float> grouped(shape_of(2, repeat, 8, 6), offsets({90, 20}));
    grouped.normalise().run(Form::Chunked);
    RuleCase<float> plain(shape_of(2 * repeat, 1, 8, 6), grouped.cu);
    plain.v = grouped.v, plain.g = grouped.g, plain.beta = grouped.beta, plain.d_o = grouped.d_o;
    plain.initial = grouped.initial, plain.d_final = grouped.d_final;
    for (int64 t = 0; t < 110; ++t)
      for (int64 j = 0; j < plain.q.cols; ++j) {
        const int64 from = j / (8 * repeat) * 8 + j % 8;
        plain.q(t, j) = grouped.q(t, from);
        plain.k(t, j) = grouped.k(t, from);
      }
    plain.run(Form::Chunked);
    CHECK(same_bits(plain.o, grouped.o));
    CHECK(same_bits(plain.dv, grouped.dv));
    CHECK(same_bits(plain.dg, grouped.dg));
    Tensor<float> dq(110, 16), dk(110, 16);
    dq.zero(), dk.zero();
    for (int64 t = 0; t < 110; ++t)
      for (int64 h = 0; h < 2 * repeat; ++h)
        for (int64 j = 0; j < 8; ++j) {
          dq(t, h / repeat * 8 + j) += plain.dq(t, h * 8 + j);
          dk(t, h / repeat * 8 + j) += plain.dk(t, h * 8 + j);
        }
    CHECK(same_bits(dq, grouped.dq));
    CHECK(same_bits(dk, grouped.dk));
  }
}

TEST_CASE("a sequence cut at a chunk boundary continues from its state") {
  RuleCase<float> whole(shape_of(1, 1, 16, 12, true), offsets({200}));
  whole.run(Form::Chunked);
  RuleCase<float> first(whole.shape, {0, 128}), second(whole.shape, {0, 72});
  auto part = [](auto& to, const auto& from, int64 row) {
    std::copy_n(from.data.begin() + row * from.cols, to.data.size(), to.data.begin());
  };
  for (auto* c : {&first, &second}) {
    const int64 row = c == &first ? 0 : 128;
    part(c->q, whole.q, row), part(c->k, whole.k, row), part(c->v, whole.v, row);
    part(c->d_o, whole.d_o, row), part(c->g, whole.g, row), part(c->beta, whole.beta, row);
  }
  first.initial = whole.initial;
  rule_chunk_forward<float>(first.shape, first.cu, first.forward_args());
  second.initial = first.final;
  second.d_final = whole.d_final;
  second.run(Form::Chunked);
  first.d_final = second.d_initial;
  first.run(Form::Chunked);
  CHECK(same_bits(second.final, whole.final));
  CHECK(same_bits(first.d_initial, whole.d_initial));
  for (int64 t = 0; t < 72; ++t) CHECK(second.o(t, 3) == whole.o(128 + t, 3));
  for (int64 t = 0; t < 128; ++t) CHECK(first.dk(t, 3) == whole.dk(t, 3));
}

TEST_CASE("inputs and outputs may be column slices of wider matrices") {
  RuleCase<bf16> c(shape_of(1, 2, 8, 6, true), offsets({70, 9}));
  c.run(Form::Chunked);
  auto sliced = c;
  // One projection holds q | k | v, its gradient the three gradients, at odd offsets.
  Tensor<bf16> mixed(79, 3 + 8 + 8 + 12), grad(79, 31);
  auto into = [](Tensor<bf16>& to, const Tensor<bf16>& from, int64 col) {
    for (int64 i = 0; i < from.rows; ++i)
      for (int64 j = 0; j < from.cols; ++j) to(i, col + j) = from(i, j);
  };
  into(mixed, c.q, 3), into(mixed, c.k, 11), into(mixed, c.v, 19);
  auto f = sliced.forward_args();
  auto b = sliced.backward_args();
  f.q = b.q = mixed.view().columns(3, 8);
  f.k = b.k = mixed.view().columns(11, 8);
  f.v = b.v = mixed.view().columns(19, 12);
  b.dq = grad.view().columns(3, 8);
  b.dk = grad.view().columns(11, 8);
  b.dv = grad.view().columns(19, 12);
  rule_chunk_forward<bf16>(c.shape, c.cu, f);
  rule_chunk_backward<bf16>(c.shape, c.cu, b);
  CHECK(same_bits(sliced.o, c.o));
  for (int64 t = 0; t < 79; ++t) {
    for (int64 j = 0; j < 8; ++j) CHECK(grad(t, 3 + j) == c.dq(t, j));
    for (int64 j = 0; j < 8; ++j) CHECK(grad(t, 11 + j) == c.dk(t, j));
    for (int64 j = 0; j < 12; ++j) CHECK(grad(t, 19 + j) == c.dv(t, j));
    CHECK(std::isnan(static_cast<float>(grad(t, 0))));
  }
}
