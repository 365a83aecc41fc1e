#include "reference/gdn2.h"

#include "reference/delta.h"
#include "reference/rule_check.h"

namespace gdn::reference {
namespace {

template <class A> class Gdn2Token {
public:
  explicit Gdn2Token(const RuleShape& s)
      : shape(s), q(at(s.key_dim)), k(q), b(q), e(q), decay(q), v(at(s.value_dim)), w(v), y(v) {}

  // Row t and value head h of q, k, v, b, w, g in Gdn2Forward or Gdn2Backward.
  template <class P> void load(const P& p, int64 t, int64 h) {
    const int64 dk = shape.key_dim, dv = shape.value_dim, key = h / shape.repeat() * dk;
    load_key(&p.q(t, key), q.data(), q_rstd);
    load_key(&p.k(t, key), k.data(), k_rstd);
    load_row(&p.b(t, h * dk), dk, b.data());
    load_row(&p.v(t, h * dv), dv, v.data());
    load_row(&p.w(t, h * dv), dv, w.data());
    for (int64 c = 0; c < dk; ++c) {
      e[at(c)] = b[at(c)] * k[at(c)];
      decay[at(c)] = std::exp(static_cast<A>(p.g.get(t, h * dk + c)));
    }
    for (int64 j = 0; j < dv; ++j) y[at(j)] = w[at(j)] * v[at(j)];
  }
  DeltaToken<A> view() const {
    return {shape.key_dim, shape.value_dim, q.data(), k.data(), e.data(), y.data(), decay.data()};
  }

  const RuleShape& shape;
  std::vector<A> q, k, b, e, decay, v, w, y;
  A q_rstd = 1, k_rstd = 1;

private:
  template <class T> void load_key(const T* from, A* to, A& rstd) {
    if (shape.l2norm)
      rstd = l2_normalise<T>(from, shape.key_dim, shape.l2_eps, to);
    else
      load_row(from, shape.key_dim, to);
  }
};

template <class P> void check(const RuleShape& s, Sequences sequences, const P& p) {
  check_rule_shape(s);
  check_sequences(sequences, p.v.rows);
  const int64 n = p.v.rows;
  expect(n == 0 || (p.q && p.k && p.v && p.g && p.b && p.w), "GDN2 needs q, k, v, g, b and w");
  expect_shape(p.q, n, s.key_heads * s.key_dim, "q");
  expect_shape(p.k, n, s.key_heads * s.key_dim, "k");
  expect_shape(p.v, n, s.value_heads * s.value_dim, "v");
  expect_shape(p.w, n, s.value_heads * s.value_dim, "write gate");
  expect_shape(p.b, n, s.value_heads * s.key_dim, "erase gate");
  expect_shape(p.g, n, s.value_heads * s.key_dim, "g");
  check_rule_states(s, sequences, p.initial_state, "initial state");
}

} // namespace

template <class T>
void gdn2_forward(const RuleShape& shape, Sequences sequences, const Gdn2Forward<T>& p) {
  using A = Acc<T>;
  check(shape, sequences, p);
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  expect_shape(p.o, p.v.rows, heads * dv, "o");
  check_rule_states(shape, sequences, p.final_state, "final state");
  Gdn2Token<A> token(shape);
  std::vector<A> o(at(dv));
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 h = 0; h < heads; ++h) {
      auto state = state_of<A>(p.initial_state, s * heads + h, dk, dv);
      std::vector<A> sum(at(dk)); // of g, restarted in every chunk
      for (int64 t = sequences[at(s)]; t < sequences[at(s) + 1]; ++t) {
        token.load(p, t, h);
        delta_step(token.view(), static_cast<A>(shape.read_scale()), state.data(), o.data());
        store_row(o.data(), dv, &p.o(t, h * dv), Write::Overwrite);
        if (!p.g_cum) continue;
        if ((t - sequences[at(s)]) % kChunk == 0) sum.assign(sum.size(), 0);
        for (int64 c = 0; c < dk; ++c) {
          sum[at(c)] += static_cast<A>(p.g.get(t, h * dk + c));
          p.g_cum.set(t, h * dk + c, static_cast<double>(sum[at(c)]));
        }
      }
      put_state(state, p.final_state, s * heads + h, dk, dv);
    }
  zero_rows(p.o, sequences.back());
  zero_rows(p.g_cum, sequences.back());
}

template <class T>
void gdn2_backward(const RuleShape& shape, Sequences sequences, const Gdn2Backward<T>& p) {
  using A = Acc<T>;
  check(shape, sequences, p);
  check_rule_states(shape, sequences, p.d_final_state, "final state gradient");
  check_rule_states(shape, sequences, p.d_initial_state, "initial state gradient");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  expect_shape(p.d_o, p.v.rows, heads * dv, "gradient of o");
  Gdn2Token<A> token(shape);
  std::vector<A> row(at(dv));
  for (int64 s = 0; s < sequence_count(sequences); ++s) {
    const int64 first = sequences[at(s)], end = sequences[at(s) + 1];
    for (int64 key_head = 0; key_head < shape.key_heads; ++key_head) {
      std::vector<A> dq(at((end - first) * dk)), dkey(dq); // sums over the value heads
      for (int64 h = key_head * shape.repeat(); h < (key_head + 1) * shape.repeat(); ++h) {
        auto d_state = state_of<A>(p.d_final_state, s * heads + h, dk, dv);
        delta_backward<A>(
            first, end, dk, dv, static_cast<A>(shape.read_scale()),
            state_of<A>(p.initial_state, s * heads + h, dk, dv), d_state.data(),
            [&](int64 t) {
              token.load(p, t, h);
              return token.view();
            },
            [&](int64 t) {
              load_row(&p.d_o(t, h * dv), dv, row.data());
              return row.data();
            },
            [&](int64 t, DeltaGrads<A>& d) {
              for (int64 c = 0; c < dk; ++c) {
                dq[at((t - first) * dk + c)] += d.dq[at(c)];
                dkey[at((t - first) * dk + c)] += d.dk[at(c)] + token.b[at(c)] * d.de[at(c)];
                d.de[at(c)] *= token.k[at(c)]; // gradient of b
                if (p.dg) p.dg.put(t, h * dk + c, static_cast<double>(d.dg[at(c)]));
              }
              if (p.db) store_row(d.de.data(), dk, &p.db.to(t, h * dk), p.db.write);
              for (int64 j = 0; j < dv; ++j) row[at(j)] = d.dy[at(j)] * token.v[at(j)];
              if (p.dw) store_row(row.data(), dv, &p.dw.to(t, h * dv), p.dw.write);
              for (int64 j = 0; j < dv; ++j) row[at(j)] = d.dy[at(j)] * token.w[at(j)];
              if (p.dv) store_row(row.data(), dv, &p.dv.to(t, h * dv), p.dv.write);
            });
        put_state(d_state, p.d_initial_state, s * heads + h, dk, dv);
      }
      for (int64 t = first; t < end; ++t) {
        token.load(p, t, key_head * shape.repeat());
        A *q = &dq[at((t - first) * dk)], *k = &dkey[at((t - first) * dk)];
        if (shape.l2norm) {
          l2_input_gradient(token.q.data(), token.q_rstd, dk, q);
          l2_input_gradient(token.k.data(), token.k_rstd, dk, k);
        }
        if (p.dq) store_row(q, dk, &p.dq.to(t, key_head * dk), p.dq.write);
        if (p.dk) store_row(k, dk, &p.dk.to(t, key_head * dk), p.dk.write);
      }
    }
  }
  for (const auto& g : {p.dq, p.dk, p.dv, p.db, p.dw}) zero_rows_of(g, sequences.back());
  zero_rows_of(p.dg, sequences.back());
}

#define GDN_GDN2(T)                                                                                \
  template void gdn2_forward<T>(const RuleShape&, Sequences, const Gdn2Forward<T>&);               \
  template void gdn2_backward<T>(const RuleShape&, Sequences, const Gdn2Backward<T>&);
GDN_GDN2(bf16)
GDN_GDN2(float)
GDN_GDN2(double)
#undef GDN_GDN2

} // namespace gdn::reference
