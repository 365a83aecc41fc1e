#include "reference/gates.h"

#include <cmath>

#include "reference/detail.h"

namespace gdn::reference {

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

double sigmoid(double x) {
  // Both tails keep their relative precision.
  if (x >= 0) return 1 / (1 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1 + e);
}

void gates_forward(ConstValues alpha, ConstValues b, ConstValues a_log, ConstValues dt_bias,
                   bool double_beta, Values g, Values beta) {
  expect_shape(alpha, g.rows, g.cols, "alpha");
  expect_shape(b, beta.rows, beta.cols, "beta logits");
  const double factor = double_beta ? 2 : 1;
  for (int64 j = 0; j < g.cols; ++j) {
    const double rate = std::exp(a_log.get(j)), bias = dt_bias.get(j);
    for (int64 i = 0; i < g.rows; ++i) g.set(i, j, -rate * softplus(alpha.get(i, j) + bias));
  }
  for (int64 i = 0; i < beta.rows; ++i)
    for (int64 j = 0; j < beta.cols; ++j) beta.set(i, j, factor * sigmoid(b.get(i, j)));
}

void gates_backward(const GatesBackward& p, bool double_beta) {
  decay_backward(1, p.alpha, p.a_log, p.dt_bias, p.dg, p.dalpha, p.da_log, p.ddt_bias);
  if (!p.db) return;
  const double factor = double_beta ? 2 : 1;
  for (int64 i = 0; i < p.b.rows; ++i)
    for (int64 j = 0; j < p.b.cols; ++j) {
      const double x = p.b.get(i, j);
      p.db.put(i, j, factor * p.dbeta.get(i, j) * sigmoid(x) * sigmoid(-x));
    }
}

void decay_forward(int64 key_dim, ConstValues f, ConstValues a_log, ConstValues dt_bias, Values g) {
  expect_shape(f, g.rows, g.cols, "decay logits");
  for (int64 i = 0; i < g.rows; ++i)
    for (int64 j = 0; j < g.cols; ++j)
      g.set(i, j, -std::exp(a_log.get(j / key_dim)) * softplus(f.get(i, j) + dt_bias.get(j)));
}

void decay_backward(int64 key_dim, ConstValues f, ConstValues a_log, ConstValues dt_bias,
                    ConstValues dg, ValuesGrad df, Values da_log, Values ddt_bias) {
  expect_shape(dg, f.rows, f.cols, "decay gradient");
  expect_shape(df, f.rows, f.cols, "decay logit gradient");
  for (int64 j = 0; j < f.cols; ++j) {
    const double rate = std::exp(a_log.get(j / key_dim)), bias = dt_bias.get(j);
    double sum_a = 0, sum_bias = 0;
    for (int64 i = 0; i < f.rows; ++i) {
      const double x = f.get(i, j) + bias, d = dg.get(i, j);
      const double dx = -rate * sigmoid(x) * d;
      sum_a += -rate * softplus(x) * d; // dg * g
      sum_bias += dx;
      if (df) df.put(i, j, dx);
    }
    if (da_log) da_log.add(j / key_dim, sum_a);
    if (ddt_bias) ddt_bias.add(j, sum_bias);
  }
}

void sigmoid_forward(ConstValues x, Values y) {
  expect_shape(x, y.rows, y.cols, "sigmoid input");
  for (int64 i = 0; i < y.rows; ++i)
    for (int64 j = 0; j < y.cols; ++j) y.set(i, j, sigmoid(x.get(i, j)));
}

void sigmoid_backward(ConstValues x, ConstValues dy, ValuesGrad dx) {
  expect_shape(dx, x.rows, x.cols, "sigmoid input gradient");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 j = 0; j < x.cols; ++j) {
      const double s = x.get(i, j);
      dx.put(i, j, dy.get(i, j) * sigmoid(s) * sigmoid(-s));
    }
}

} // namespace gdn::reference
