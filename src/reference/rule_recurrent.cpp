#include "reference/delta.h"
#include "reference/rule_check.h"

namespace gdn::reference {
template <class T>
void rule_recurrent_forward(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p) {
  using A = Acc<T>;
  check_rule_forward(shape, p);
  check_sequences(sequences, p.v.rows);
  check_rule_states(shape, sequences, p.initial_state, "initial state");
  check_rule_states(shape, sequences, p.final_state, "final state");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  GdnToken<A> token(shape);
  std::vector<A> o(at(dv));
  for (int64 s = 0; s < sequence_count(sequences); ++s)
    for (int64 h = 0; h < heads; ++h) {
      auto state = state_of<A>(p.initial_state, s * heads + h, dk, dv);
      for (int64 t = sequences[at(s)]; t < sequences[at(s) + 1]; ++t) {
        token.load(p, t, h);
        delta_step(token.view(), static_cast<A>(shape.read_scale()), state.data(), o.data());
        store_row(o.data(), dv, &p.o(t, h * dv), Write::Overwrite);
      }
      put_state(state, p.final_state, s * heads + h, dk, dv);
    }
  zero_rows(p.o, sequences.back());
}

template <class T>
void rule_recurrent_backward(const RuleShape& shape, Sequences sequences,
                             const RuleBackward<T>& p) {
  using A = Acc<T>;
  check_rule_backward(shape, p);
  check_sequences(sequences, p.v.rows);
  check_rule_states(shape, sequences, p.initial_state, "initial state");
  check_rule_states(shape, sequences, p.d_final_state, "final state gradient");
  check_rule_states(shape, sequences, p.d_initial_state, "initial state gradient");
  expect(p.v.rows == 0 || (p.q && p.k && p.g), "the recurrent form starts from q, k and g");
  const int64 dk = shape.key_dim, dv = shape.value_dim, heads = shape.value_heads;
  const A scale = static_cast<A>(shape.read_scale());
  GdnToken<A> token(shape);
  std::vector<A> row(at(dv));
  for (int64 s = 0; s < sequence_count(sequences); ++s) {
    const int64 first = sequences[at(s)], end = sequences[at(s) + 1];
    for (int64 key_head = 0; key_head < shape.key_heads; ++key_head) {
      std::vector<A> dq(at((end - first) * dk)), dkey(dq); // sums over the value heads
      for (int64 h = key_head * shape.repeat(); h < (key_head + 1) * shape.repeat(); ++h) {
        auto d_state = state_of<A>(p.d_final_state, s * heads + h, dk, dv);
        delta_backward<A>(
            first, end, dk, dv, scale, state_of<A>(p.initial_state, s * heads + h, dk, dv),
            d_state.data(),
            [&](int64 t) {
              token.load(p, t, h);
              return token.view();
            },
            [&](int64 t) {
              load_row(&p.d_o(t, h * dv), dv, row.data());
              return row.data();
            },
            [&](int64 t, DeltaGrads<A>& d) {
              A dbeta = 0, dg = 0;
              for (int64 c = 0; c < dk; ++c) {
                dbeta += d.de[at(c)] * token.k[at(c)];
                dg += d.dg[at(c)];
                dq[at((t - first) * dk + c)] += d.dq[at(c)];
                dkey[at((t - first) * dk + c)] += d.dk[at(c)] + token.beta * d.de[at(c)];
              }
              for (int64 j = 0; j < dv; ++j) {
                dbeta += d.dy[at(j)] * token.v[at(j)];
                d.dy[at(j)] *= token.beta;
              }
              if (p.dv) store_row(d.dy.data(), dv, &p.dv.to(t, h * dv), p.dv.write);
              if (p.dg) p.dg.put(t, h, static_cast<double>(dg));
              if (p.dbeta) p.dbeta.put(t, h, static_cast<double>(dbeta));
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
  zero_rows_of(p.dq, sequences.back());
  zero_rows_of(p.dk, sequences.back());
  zero_rows_of(p.dv, sequences.back());
  zero_rows_of(p.dg, sequences.back());
  zero_rows_of(p.dbeta, sequences.back());
}

template void rule_recurrent_forward<bf16>(const RuleShape&, Sequences, const RuleForward<bf16>&);
template void rule_recurrent_forward<float>(const RuleShape&, Sequences, const RuleForward<float>&);
template void rule_recurrent_forward<double>(const RuleShape&, Sequences,
                                             const RuleForward<double>&);
// The adjoint of the definition is an oracle only.
template void rule_recurrent_backward<double>(const RuleShape&, Sequences,
                                              const RuleBackward<double>&);

} // namespace gdn::reference
