#include "reference/gates.h"
#include "reference/gdn2.h"
#include "rule_case.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

struct Gdn2Case {
  RuleShape shape;
  std::vector<int64> cu;
  Tensor<double> q, k, v, g, b, w, initial, d_o, d_final;
  Tensor<double> o, final, dq, dk, dv, dg, db, dw, d_initial;

  Gdn2Case(RuleShape s, std::vector<int64> offsets)
      : shape(s), cu(std::move(offsets)), q(cu.back(), s.key_heads * s.key_dim), k(q),
        v(cu.back(), s.value_heads * s.value_dim), g(cu.back(), s.value_heads * s.key_dim), b(g),
        w(v), initial((int64(cu.size()) - 1) * s.value_heads * s.key_dim, s.value_dim), d_o(v),
        d_final(initial), o(v), final(initial), dq(q), dk(q), dv(v), dg(g), db(g), dw(v),
        d_initial(initial) {
    for (auto* m : {&q, &k, &v, &initial, &d_o, &d_final}) m->normal();
    g.uniform(-2, 0);
    b.uniform(0, 1);
    w.uniform(0, 1);
    if (!shape.l2norm) {
      l2norm_forward<double>(s.key_dim, Tensor<double>(q), q, {});
      l2norm_forward<double>(s.key_dim, Tensor<double>(k), k, {});
    }
  }
  void forward() {
    Gdn2Forward<double> p;
    p.q = q, p.k = k, p.v = v, p.g = g, p.b = b, p.w = w, p.initial_state = initial;
    p.o = o, p.final_state = final;
    gdn2_forward<double>(shape, cu, p);
  }
  void backward() {
    Gdn2Backward<double> p;
    p.q = q, p.k = k, p.v = v, p.g = g, p.b = b, p.w = w, p.initial_state = initial;
    p.d_o = d_o, p.d_final_state = d_final, p.d_initial_state = d_initial;
    p.dq = dq, p.dk = dk, p.dv = dv, p.dg = dg, p.db = db, p.dw = dw;
    gdn2_backward<double>(shape, cu, p);
  }
};

} // namespace

TEST_CASE("GDN2 is its definition: (I - k (b k)^T) Diag(e^g) S + k (w v)^T") {
  Gdn2Case c(shape_of(1, 2, 3, 4), offsets({5, 2}));
  c.forward();
  for (int64 s = 0; s < 2; ++s)
    for (int64 h = 0; h < 2; ++h) {
      double S[3][4];
      for (int64 i = 0; i < 3; ++i)
        for (int64 j = 0; j < 4; ++j) S[i][j] = c.initial((s * 2 + h) * 3 + i, j);
      for (int64 t = c.cu[std::size_t(s)]; t < c.cu[std::size_t(s) + 1]; ++t) {
        double next[3][4] = {};
        for (int64 i = 0; i < 3; ++i)
          for (int64 j = 0; j < 4; ++j) {
            for (int64 l = 0; l < 3; ++l)
              next[i][j] += ((i == l ? 1 : 0) - c.k(t, i) * c.b(t, h * 3 + l) * c.k(t, l)) *
                            std::exp(c.g(t, h * 3 + l)) * S[l][j];
            next[i][j] += c.k(t, i) * c.w(t, h * 4 + j) * c.v(t, h * 4 + j);
          }
        std::memcpy(S, next, sizeof(S));
        for (int64 j = 0; j < 4; ++j) {
          double o = 0;
          for (int64 i = 0; i < 3; ++i) o += S[i][j] * c.q(t, i) / std::sqrt(3.0);
          CHECK(c.o(t, h * 4 + j) == doctest::Approx(o).epsilon(1e-12));
        }
      }
    }
}

TEST_CASE("GDN2 gradients against central differences, across blocks of rebuilt states") {
  for (const bool l2norm : {false, true}) {
    Gdn2Case c(shape_of(1, 2, 4, 3, l2norm), offsets({70, 0, 3}));
    c.backward();
    auto loss = [&] {
      c.forward();
      return dot(c.d_o, c.o) + dot(c.d_final, c.final);
    };
    for (auto [x, dx] : {std::pair{&c.q, &c.dq},
                         {&c.k, &c.dk},
                         {&c.v, &c.dv},
                         {&c.g, &c.dg},
                         {&c.b, &c.db},
                         {&c.w, &c.dw},
                         {&c.initial, &c.d_initial}})
      CHECK(gradient_error(*x, *dx, loss, 60) < kNumericGradient);
  }
}

TEST_CASE("equal gates on all channels give the gated delta rule") {
  const auto shape = shape_of(1, 2, 6, 5);
  RuleCase<double> rule(shape, offsets({40, 9}));
  rule.set(Decay::Squares);
  rule.normalise().run(Form::Recurrent);
  Gdn2Case c(shape, rule.cu);
  c.q = rule.q, c.k = rule.k, c.v = rule.v, c.initial = rule.initial;
  c.d_o = rule.d_o, c.d_final = rule.d_final;
  for (int64 t = 0; t < 49; ++t)
    for (int64 h = 0; h < 2; ++h) {
      for (int64 i = 0; i < 6; ++i)
        c.g(t, h * 6 + i) = rule.g(t, h), c.b(t, h * 6 + i) = rule.beta(t, h);
      for (int64 j = 0; j < 5; ++j) c.w(t, h * 5 + j) = rule.beta(t, h);
    }
  c.forward();
  c.backward();
  CHECK(max_error(c.o, rule.o) < 1e-14);
  CHECK(max_error(c.dq, rule.dq) < 1e-13);
  CHECK(max_error(c.dk, rule.dk) < 1e-13);
  CHECK(max_error(c.dv, rule.dv) < 1e-13);
  for (int64 t = 0; t < 49; ++t)
    for (int64 h = 0; h < 2; ++h) {
      double dg = 0, dbeta = 0;
      for (int64 i = 0; i < 6; ++i) dg += c.dg(t, h * 6 + i), dbeta += c.db(t, h * 6 + i);
      for (int64 j = 0; j < 5; ++j) dbeta += c.dw(t, h * 5 + j);
      CHECK(dg == doctest::Approx(rule.dg(t, h)).epsilon(1e-9));
      CHECK(dbeta == doctest::Approx(rule.dbeta(t, h)).epsilon(1e-9));
    }
}

TEST_CASE("GDN2's running decay restarts every 64 tokens of a sequence") {
  Gdn2Case c(shape_of(1, 1, 2, 2), offsets({70, 5}));
  Tensor<double> g_cum(75, 2);
  Gdn2Forward<double> p;
  p.q = c.q, p.k = c.k, p.v = c.v, p.g = c.g, p.b = c.b, p.w = c.w, p.o = c.o, p.g_cum = g_cum;
  gdn2_forward<double>(c.shape, c.cu, p);
  CHECK(g_cum(1, 1) == c.g(0, 1) + c.g(1, 1));
  CHECK(g_cum(64, 1) == c.g(64, 1));
  CHECK(g_cum(70, 0) == c.g(70, 0));
}
