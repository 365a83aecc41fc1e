#pragma once
#include <algorithm>
#include <cmath>

#include "reference/detail.h"
#include "reference/l2row.h"
#include "reference/rule.h"

// The recurrence that GDN and GDN2 share, for one head, and its adjoint:
//
//   S' = Diag(e^g) S      u = y - S'^T e      S <- S' + k u^T      o = s S^T q
//
// with erase vector e and written value y: e = beta k, y = beta v (GDN), e = b * k, y = w * v
// (GDN2).
namespace gdn::reference {

template <class A> struct DeltaToken {
  int64 dk, dv;
  const A *q, *k, *e; // [dk]
  const A* y;         // [dv]
  const A* decay;     // [dk], e^g
};

// state [dk, dv] is updated in place; o [dv] may be null.
template <class A> void delta_step(const DeltaToken<A>& t, A scale, A* state, A* o) {
  A* const end = state + t.dk * t.dv;
  std::vector<A> u(t.y, t.y + t.dv);
  const A *e = t.e, *k = t.k, *q = t.q, *decay = t.decay;
  for (A* row = state; row != end; row += t.dv, ++e, ++decay)
    for (int64 j = 0; j < t.dv; ++j) {
      row[j] *= *decay;
      u[at(j)] -= *e * row[j];
    }
  if (o) std::fill(o, o + t.dv, A(0));
  for (A* row = state; row != end; row += t.dv, ++k, ++q)
    for (int64 j = 0; j < t.dv; ++j) {
      row[j] += *k * u[at(j)];
      if (o) o[j] += scale * *q * row[j];
    }
}

// Gradients of one token, all [dk] but dy [dv].
template <class A> struct DeltaGrads {
  std::vector<A> dq, dk, de, dy, dg;
  DeltaGrads(int64 key_dim, int64 value_dim)
      : dq(at(key_dim)), dk(at(key_dim)), de(at(key_dim)), dy(at(value_dim)), dg(at(key_dim)) {}
};

// `before` is the state that the token found; d_state goes in as the gradient of the state it left
// and comes out as that of `before`. dg is taken with the decayed state on both sides, without a
// division.
template <class A>
void delta_step_backward(const DeltaToken<A>& t, A scale, const A* before, const A* d_o, A* d_state,
                         DeltaGrads<A>& grads) {
  std::vector<A> decayed(before, before + t.dk * t.dv), u(t.y, t.y + t.dv), du(at(t.dv));
  for (int64 c = 0; c < t.dk; ++c)
    for (int64 j = 0; j < t.dv; ++j) {
      A& s = decayed[at(c * t.dv + j)];
      s *= t.decay[c];
      u[at(j)] -= t.e[c] * s;
    }
  for (int64 c = 0; c < t.dk; ++c) {
    A dq = 0, dk = 0;
    for (int64 j = 0; j < t.dv; ++j) {
      A& ds = d_state[c * t.dv + j];
      dq += (decayed[at(c * t.dv + j)] + t.k[c] * u[at(j)]) * d_o[j];
      ds += scale * t.q[c] * d_o[j];
      dk += ds * u[at(j)];
      du[at(j)] += t.k[c] * ds;
    }
    grads.dq[at(c)] = scale * dq;
    grads.dk[at(c)] = dk;
  }
  grads.dy = du;
  for (int64 c = 0; c < t.dk; ++c) {
    A de = 0, dg = 0;
    for (int64 j = 0; j < t.dv; ++j) {
      A& ds = d_state[c * t.dv + j];
      const A s = decayed[at(c * t.dv + j)];
      de -= s * du[at(j)];
      ds -= t.e[c] * du[at(j)];
      dg += s * ds;
      ds *= t.decay[c];
    }
    grads.de[at(c)] = de;
    grads.dg[at(c)] = dg;
  }
}

// Runs tokens first .. end - 1 backwards. States are rebuilt from one kept every kChunk tokens.
// token(t) gives a DeltaToken (valid until the next call), d_o(t) a row [dv], sink(t, grads) takes
// the gradients of a token right after token(t) was called. state is S_init, d_state dS_final ->
// dS_init.
template <class A, class Token, class DO, class Sink>
void delta_backward(int64 first, int64 end, int64 key_dim, int64 value_dim, A scale,
                    std::vector<A> state, A* d_state, Token token, DO d_o, Sink sink) {
  const std::size_t size = state.size();
  std::vector<A> kept; // one state a block
  for (int64 t = first; t < end; ++t) {
    if ((t - first) % kChunk == 0) kept.insert(kept.end(), state.begin(), state.end());
    delta_step<A>(token(t), scale, state.data(), nullptr);
  }
  DeltaGrads<A> grads(key_dim, value_dim);
  std::vector<A> states;
  for (int64 block = (end - first - 1) / kChunk; end > first && block >= 0; --block) {
    const int64 start = first + block * kChunk, stop = std::min(end, start + kChunk);
    states.assign(kept.begin() + block * static_cast<int64>(size),
                  kept.begin() + (block + 1) * static_cast<int64>(size));
    for (int64 t = start; t + 1 < stop; ++t) {
      states.resize(states.size() + size);
      A* next = states.data() + states.size() - size;
      std::copy(next - size, next, next);
      delta_step<A>(token(t), scale, next, nullptr);
    }
    for (int64 t = stop - 1; t >= start; --t) {
      delta_step_backward<A>(token(t), scale, states.data() + at(t - start) * size, d_o(t), d_state,
                             grads);
      sink(t, grads);
    }
  }
}

// State of one sequence and head, zeros when absent.
template <class A>
std::vector<A> state_of(const Mat<const A>& states, int64 index, int64 dk, int64 dv) {
  std::vector<A> s(at(dk * dv));
  for (int64 c = 0; states && c < dk; ++c)
    std::copy_n(states.row(index * dk + c), dv, s.data() + c * dv);
  return s;
}

template <class A>
void put_state(const std::vector<A>& s, const Mat<A>& states, int64 index, int64 dk, int64 dv) {
  for (int64 c = 0; states && c < dk; ++c)
    std::copy_n(s.data() + c * dv, dv, states.row(index * dk + c));
}

// A token of the gated delta rule, loaded into the arithmetic type; q and k normalised if asked
// for.
template <class A> class GdnToken {
public:
  explicit GdnToken(const RuleShape& s)
      : shape(s), q(at(s.key_dim)), k(q), e(q), decay(q), v(at(s.value_dim)), y(v) {}

  // Row t and value head h of q, k, v, g, beta in RuleForward or RuleBackward.
  template <class P> void load(const P& p, int64 t, int64 h) {
    const int64 dk = shape.key_dim, dv = shape.value_dim, key_head = h / shape.repeat();
    load_key(&p.q(t, key_head * dk), q.data(), q_rstd);
    load_key(&p.k(t, key_head * dk), k.data(), k_rstd);
    beta = static_cast<A>(p.beta.get(t, h));
    const A fade = std::exp(static_cast<A>(p.g.get(t, h)));
    load_row(&p.v(t, h * dv), dv, v.data());
    for (int64 c = 0; c < dk; ++c) e[at(c)] = beta * k[at(c)];
    for (int64 c = 0; c < dk; ++c) decay[at(c)] = fade;
    for (int64 j = 0; j < dv; ++j) y[at(j)] = beta * v[at(j)];
  }
  DeltaToken<A> view() const {
    return {shape.key_dim, shape.value_dim, q.data(), k.data(), e.data(), y.data(), decay.data()};
  }

  const RuleShape& shape;
  std::vector<A> q, k, e, decay, v, y;
  A beta = 0, q_rstd = 1, k_rstd = 1;

private:
  template <class T> void load_key(const T* from, A* to, A& rstd) {
    if (shape.l2norm)
      rstd = l2_normalise<T>(from, shape.key_dim, shape.l2_eps, to);
    else
      load_row(from, shape.key_dim, to);
  }
};

} // namespace gdn::reference
