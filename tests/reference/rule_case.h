#pragma once
#include <memory>

#include "reference/rule.h"
#include "support.h"

// One configuration of the gated delta rule with its inputs, outputs and gradients.
namespace gdn::reference::test {

enum class Decay { Zero, Slight, One, Strong, Underflow, Mixed, OneHuge, Squares };
enum class Strength { Zero, Tiny, Half, One, Double, Two };
enum class Keys { Random, Identical, Alternating, Period4, Cosine, ZeroRows, SmallRows };
enum class States { Absent, Random, Huge };

enum class Form { Recurrent, Chunked };

template <class T> struct RuleCase {
  using A = Acc<T>;
  RuleShape shape;
  std::vector<int64> cu;
  Tensor<T> q, k, v, d_o;
  Tensor<A> g, beta, initial, d_final;
  bool with_states = true;

  Tensor<T> o, dq, dk, dv;
  Tensor<A> final, dg, dbeta, d_initial;

  RuleCase(RuleShape s, std::vector<int64> offsets, int64 padding = 0)
      : shape(s), cu(std::move(offsets)), q(rows(padding), s.key_heads * s.key_dim), k(q),
        v(rows(padding), s.value_heads * s.value_dim), d_o(v), g(rows(padding), s.value_heads),
        beta(g), initial((int64(cu.size()) - 1) * s.value_heads * s.key_dim, s.value_dim),
        d_final(initial), o(v), dq(q), dk(q), dv(v), final(initial), dg(g), dbeta(g),
        d_initial(initial) {
    q.normal();
    k.normal();
    v.normal();
    d_o.normal();
    initial.normal();
    d_final.normal();
    set(Decay::Mixed);
    set(Strength::Half);
  }
  int64 rows(int64 padding) const { return cu.back() + padding; }

  void set(Decay d) {
    g.uniform(0, 1);
    for (int64 i = 0; i < g.rows; ++i)
      for (int64 h = 0; h < g.cols; ++h) {
        const double u = static_cast<double>(g(i, h));
        const double mixed = u < 0.34 ? 0.0 : u < 0.67 ? -20.0 : -0.01;
        const double value = d == Decay::Zero        ? 0
                             : d == Decay::Slight    ? -1e-3
                             : d == Decay::One       ? -1
                             : d == Decay::Strong    ? -20
                             : d == Decay::Underflow ? -88
                             : d == Decay::Mixed     ? mixed
                             : d == Decay::Squares   ? -3 * u * u
                             : i % 50 == 7           ? -1000
                                                     : 0;
        g(i, h) = static_cast<A>(value);
      }
  }
  void set(Strength s) {
    switch (s) {
    case Strength::Zero: beta.zero(); return;
    case Strength::Tiny: beta.fill(1e-8); return;
    case Strength::Half: beta.uniform(0, 1); return;
    case Strength::One: beta.fill(1); return;
    case Strength::Double: beta.uniform(0, 2); return;
    case Strength::Two: beta.fill(2); return;
    }
  }
  void set(Keys kind) {
    k.normal();
    for (int64 i = 0; i < k.rows; ++i)
      for (int64 j = 0; j < k.cols; ++j) {
        const double here = static_cast<double>(k(i, j)), first = static_cast<double>(k(0, j));
        const double value = kind == Keys::Identical           ? first
                             : kind == Keys::Alternating       ? (i % 2 ? -first : first)
                             : kind == Keys::Period4 && i >= 4 ? static_cast<double>(k(i - 4, j))
                             : kind == Keys::Cosine            ? 2 * first + here
                             : kind == Keys::ZeroRows && i % 3 == 1 ? 0
                             : kind == Keys::SmallRows && i % 2     ? 1e-4 * here
                                                                    : here;
        if (i > 0 || kind == Keys::SmallRows) k(i, j) = static_cast<T>(value);
      }
  }
  void set(States s) {
    with_states = s != States::Absent;
    if (s == States::Huge) initial.normal(1e4);
  }
  // q and k as the rule's caller would hand them over.
  RuleCase& normalise() {
    l2norm_forward<T>(shape.key_dim, Tensor<T>(q), q, {});
    l2norm_forward<T>(shape.key_dim, Tensor<T>(k), k, {});
    return *this;
  }

  RuleForward<T> forward_args() {
    RuleForward<T> p;
    p.q = q, p.k = k, p.v = v, p.g = g, p.beta = beta, p.o = o, p.final_state = final;
    if (with_states) p.initial_state = initial;
    return p;
  }
  RuleBackward<T> backward_args() {
    RuleBackward<T> p;
    p.q = q, p.k = k, p.v = v, p.g = g, p.beta = beta, p.d_o = d_o;
    if (with_states) p.initial_state = initial, p.d_final_state = d_final;
    p.dq = dq, p.dk = dk, p.dv = dv, p.dg = dg, p.dbeta = dbeta, p.d_initial_state = d_initial;
    return p;
  }
  // Forward and backward; the recurrent form has a backward pass in double only.
  RuleCase& run(Form form) {
    if (form == Form::Chunked) {
      rule_chunk_forward<T>(shape, cu, forward_args());
      rule_chunk_backward<T>(shape, cu, backward_args());
    } else {
      rule_recurrent_forward<T>(shape, cu, forward_args());
      if constexpr (std::is_same_v<T, double>)
        rule_recurrent_backward<T>(shape, cu, backward_args());
    }
    return *this;
  }
  // The same inputs in double.
  RuleCase<double> exact() const {
    RuleCase<double> c(shape, cu, q.rows - cu.back());
    c.q = q.template to<double>(), c.k = k.template to<double>(), c.v = v.template to<double>();
    c.d_o = d_o.template to<double>(), c.g = g.template to<double>();
    c.beta = beta.template to<double>(), c.initial = initial.template to<double>();
    c.d_final = d_final.template to<double>(), c.with_states = with_states;
    return c;
  }
};

inline RuleShape shape_of(int64 key_heads, int64 repeat, int64 dk, int64 dv, bool l2norm = false) {
  RuleShape s;
  s.key_heads = key_heads, s.value_heads = key_heads * repeat, s.key_dim = dk, s.value_dim = dv;
  s.l2norm = l2norm;
  return s;
}

} // namespace gdn::reference::test
