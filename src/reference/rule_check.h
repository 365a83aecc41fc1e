#pragma once
#include "reference/detail.h"
#include "reference/rule.h"

// Shapes of the rule's arguments.
namespace gdn::reference {

void check_rule_shape(const RuleShape& shape); // throws Error{Config}

template <class T> void check_rule_forward(const RuleShape& s, const RuleForward<T>& p) {
  check_rule_shape(s);
  const int64 n = p.v.rows;
  expect(n == 0 || (p.q && p.k && p.v && p.g && p.beta && p.o),
         "the rule needs q, k, v, g, beta and o");
  expect_shape(p.q, n, s.key_heads * s.key_dim, "q");
  expect_shape(p.k, n, s.key_heads * s.key_dim, "k");
  expect_shape(p.v, n, s.value_heads * s.value_dim, "v");
  expect_shape(p.o, n, s.value_heads * s.value_dim, "o");
  expect_shape(p.g, n, s.value_heads, "g");
  expect_shape(p.beta, n, s.value_heads, "beta");
  expect_shape(p.g_cum, n, s.value_heads, "g_cum");
  expect_shape(p.inverse, n, s.value_heads * kChunk, "inverse");
  expect_shape(p.q_norm, n, s.key_heads * s.key_dim, "q_norm");
  expect_shape(p.k_norm, n, s.key_heads * s.key_dim, "k_norm");
  expect_shape(p.q_rstd, n, s.key_heads, "q_rstd");
  expect_shape(p.k_rstd, n, s.key_heads, "k_rstd");
}

template <class T>
void check_rule_states(const RuleShape& s, Sequences sequences, const Mat<T>& states,
                       const char* name) {
  expect_shape(states, sequence_count(sequences) * s.value_heads * s.key_dim, s.value_dim, name);
}

template <class T> void check_rule_backward(const RuleShape& s, const RuleBackward<T>& p) {
  check_rule_shape(s);
  const int64 n = p.v.rows;
  expect(n == 0 ||
             ((p.q || p.q_norm) && (p.k || p.k_norm) && p.v && (p.g || p.g_cum) && p.beta && p.d_o),
         "the rule's backward needs q, k, v, g or g_cum, beta and the gradient of o");
  for (const auto& m : {p.q, p.k, p.q_norm, p.k_norm, Mat<const T>(p.dq.to), Mat<const T>(p.dk.to)})
    expect_shape(m, n, s.key_heads * s.key_dim, "q, k or a gradient of them");
  for (const auto& m : {p.v, p.d_o, Mat<const T>(p.dv.to)})
    expect_shape(m, n, s.value_heads * s.value_dim, "v, o or a gradient of them");
  for (const auto& m : {p.g, p.g_cum, p.beta, ConstValues(p.dg.to), ConstValues(p.dbeta.to)})
    expect_shape(m, n, s.value_heads, "a gate or its gradient");
  expect_shape(p.inverse, n, s.value_heads * kChunk, "inverse");
  expect(!p.q_norm || p.q_rstd, "normalised q comes with its statistic");
  expect(!p.k_norm || p.k_rstd, "normalised k comes with its statistic");
}

} // namespace gdn::reference
