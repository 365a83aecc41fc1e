// The chunk form of the rule in its textbook grouping (T = (I + M)^-1, U = T B R), with every
// matrix operand and stored tensor rounded to bf16 and everything else in double: how large an
// error a sound bf16 kernel makes on the same inputs. Independent of the grouping the CUDA kernels
// use.
#pragma once
#include "tests/gpu/numbers.h"
#include "tests/gpu/rule_oracle.h"

namespace gdn::gpu_test {

struct Matrix {
  int rows = 0, columns = 0;
  std::vector<double> x;
  Matrix() = default;
  Matrix(int r, int c) : rows(r), columns(c), x(std::size_t(r) * c, 0.0) {}
  double& operator()(int i, int j) { return x[std::size_t(i) * columns + j]; }
  double operator()(int i, int j) const { return x[std::size_t(i) * columns + j]; }
};

inline Matrix round(Matrix a) {
  for (auto& y : a.x) y = value(to_bf16(static_cast<float>(y)));
  return a;
}
inline Matrix transposed(const Matrix& a) {
  Matrix t(a.columns, a.rows);
  for (int i = 0; i < a.rows; ++i)
    for (int j = 0; j < a.columns; ++j) t(j, i) = a(i, j);
  return t;
}
inline Matrix times(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (int i = 0; i < a.rows; ++i)
    for (int k = 0; k < a.columns; ++k)
      for (int j = 0; j < b.columns; ++j) c(i, j) += a(i, k) * b(k, j);
  return c;
}
inline Matrix plus(Matrix a, const Matrix& b, double factor = 1) {
  for (std::size_t i = 0; i < a.x.size(); ++i) a.x[i] += factor * b.x[i];
  return a;
}
inline Matrix scale_rows(Matrix a, const std::vector<double>& f) {
  for (int i = 0; i < a.rows; ++i)
    for (int j = 0; j < a.columns; ++j) a(i, j) *= f[i];
  return a;
}

inline void rule_rounded_head(const RuleProblem& p, RuleResult& r, int sequence, int first,
                              int head, std::vector<double>& dq_sum, std::vector<double>& dk_sum) {
  const int K = p.key_dim, V = p.value_dim, n = p.lengths[sequence], hv = p.value_heads(), C = 64;
  const int hk = head / p.group, chunks = (n + C - 1) / C;
  const std::size_t state_at = (static_cast<std::size_t>(sequence) * hv + head) * K * V;
  struct Chunk {
    Matrix q, k, v, d_o, s, t, u, r, qk, kk, decay;
    std::vector<double> gamma, rise, rest, beta, read;
  };
  std::vector<Chunk> all(chunks);
  Matrix S(K, V);
  if (!p.initial.empty()) std::copy_n(p.initial.begin() + state_at, K * V, S.x.begin());
  for (int c = 0; c < chunks; ++c) {
    Chunk& h = all[c];
    const int m = std::min(C, n - c * C);
    auto rows = [&](const std::vector<double>& x, int heads, int at, int width, bool norm) {
      Matrix out(m, width);
      for (int i = 0; i < m; ++i) {
        const double* in = &x[(std::size_t(first + c * C + i) * heads + at) * width];
        double sum = p.epsilon;
        for (int j = 0; j < width; ++j) sum += in[j] * in[j];
        const double rho = norm && p.l2_norm ? 1 / std::sqrt(sum) : 1;
        for (int j = 0; j < width; ++j) out(i, j) = in[j] * rho;
      }
      return round(out);
    };
    h.q = rows(p.q, p.key_heads, hk, K, true);
    h.k = rows(p.k, p.key_heads, hk, K, true);
    h.v = rows(p.v, hv, head, V, false);
    h.d_o = rows(p.d_o, hv, head, V, false);
    double gamma = 0;
    for (int i = 0; i < m; ++i) {
      const std::size_t at = std::size_t(first + c * C + i) * hv + head;
      h.gamma.push_back(gamma += p.g[at]);
      h.beta.push_back(p.beta[at]);
      h.rise.push_back(std::exp(gamma));
      h.read.push_back(p.scale * std::exp(gamma));
    }
    for (int i = 0; i < m; ++i) h.rest.push_back(std::exp(gamma - h.gamma[i]));
    h.decay = Matrix(m, m);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j <= i; ++j) h.decay(i, j) = std::exp(h.gamma[i] - h.gamma[j]);
    h.kk = times(h.k, transposed(h.k));
    h.qk = times(h.q, transposed(h.k));
    Matrix t(m, m); // (I + M)^-1 by substitution
    for (int j = 0; j < m; ++j)
      for (int i = j; i < m; ++i) {
        double sum = i == j;
        for (int l = j; l < i; ++l) sum -= h.beta[i] * h.kk(i, l) * h.decay(i, l) * t(l, j);
        t(i, j) = sum;
      }
    h.t = round(t);
    h.s = round(S);
    h.r = plus(h.v, scale_rows(times(h.k, h.s), h.rise), -1);
    h.u = round(times(h.t, round(scale_rows(h.r, h.beta))));
    Matrix attention(m, m);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j <= i; ++j) attention(i, j) = p.scale * h.qk(i, j) * h.decay(i, j);
    const Matrix o = round(plus(scale_rows(times(h.q, h.s), h.read), times(round(attention), h.u)));
    for (int i = 0; i < m; ++i)
      std::copy_n(&o.x[std::size_t(i) * V], V,
                  &r.o[(std::size_t(first + c * C + i) * hv + head) * V]);
    for (auto& y : S.x) y *= std::exp(gamma);
    S = plus(S, times(transposed(h.k), round(scale_rows(h.u, h.rest))));
  }
  std::copy_n(S.x.begin(), K * V, r.final_state.begin() + state_at);

  Matrix D(K, V); // gradient of the state behind the chunk
  if (!p.d_final.empty()) std::copy_n(p.d_final.begin() + state_at, K * V, D.x.begin());
  for (int c = chunks - 1; c >= 0; --c) {
    const Chunk& h = all[c];
    const int m = h.q.rows;
    const Matrix d = round(D);
    Matrix attention(m, m);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j <= i; ++j) attention(i, j) = p.scale * h.qk(i, j) * h.decay(i, j);
    const Matrix du =
        round(plus(times(transposed(round(attention)), h.d_o), scale_rows(times(h.k, d), h.rest)));
    const Matrix e = times(transposed(h.t), du);
    const Matrix dr = round(scale_rows(e, h.beta)), e_rounded = round(e);
    Matrix da = times(h.d_o, transposed(h.u)), dm = times(e_rounded, transposed(h.u)), dkk(m, m),
           w(m, m);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < m; ++j) {
        da(i, j) = i >= j ? p.scale * da(i, j) * h.decay(i, j) : 0;
        dm(i, j) = i > j ? -dm(i, j) : 0;
        dkk(i, j) = dm(i, j) * h.beta[i] * h.decay(i, j);
        w(i, j) = i > j ? da(i, j) * h.qk(i, j) + dkk(i, j) * h.kk(i, j) : 0;
      }
    const Matrix h1 = scale_rows(times(h.d_o, transposed(h.s)), h.read);
    const Matrix h2 = scale_rows(times(dr, transposed(h.s)), h.rise);
    const Matrix h3 = scale_rows(times(h.u, transposed(d)), h.rest);
    const Matrix dq = plus(h1, times(round(da), h.k));
    Matrix dk = plus(plus(h3, h2, -1), times(transposed(round(da)), h.q));
    dk = plus(dk, times(round(plus(dkk, transposed(dkk))), h.k));
    double state = 0;
    for (std::size_t i = 0; i < d.x.size(); ++i) state += h.s.x[i] * d.x[i];
    state *= h.rise[m - 1];
    std::vector<double> y(m), z(m);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < K; ++j) {
        y[i] += h.q(i, j) * h1(i, j) - h.k(i, j) * h2(i, j);
        z[i] += h.k(i, j) * h3(i, j);
      }
    for (int t = 0; t < m; ++t) {
      const std::size_t at = std::size_t(first + c * C + t) * hv + head;
      double dg = state, db = 0;
      for (int i = 0; i < m; ++i) dg += i >= t ? y[i] : z[i];
      for (int i = t; i < m; ++i)
        for (int j = 0; j < t; ++j) dg += w(i, j);
      for (int j = 0; j < V; ++j) db += e_rounded(t, j) * h.r(t, j);
      for (int j = 0; j < t; ++j) db += dm(t, j) * h.kk(t, j) * h.decay(t, j);
      r.dg[at] = dg;
      r.dbeta[at] = db;
      for (int j = 0; j < V; ++j) r.dv[at * V + j] = dr(t, j);
      for (int j = 0; j < K; ++j) {
        dq_sum[std::size_t(c * C + t) * K + j] += dq(t, j);
        dk_sum[std::size_t(c * C + t) * K + j] += dk(t, j);
      }
    }
    for (auto& y : D.x) y *= h.rise[m - 1];
    D = plus(D, times(transposed(h.q), round(scale_rows(h.d_o, h.read))));
    D = plus(D, times(transposed(h.k), round(scale_rows(dr, h.rise))), -1);
  }
  std::copy_n(D.x.begin(), K * V, r.d_initial.begin() + state_at);
}

inline RuleResult rule_rounded(const RuleProblem& p) {
  RuleResult r = rule_by_heads(p, [&](RuleResult& out, int sequence, int first, int key_head,
                                      std::vector<double>& dq, std::vector<double>& dk) {
    for (int h = 0; h < p.group; ++h)
      rule_rounded_head(p, out, sequence, first, key_head * p.group + h, dq, dk);
  });
  for (auto* x : {&r.dq, &r.dk})
    for (auto& y : *x) y = value(to_bf16(static_cast<float>(y)));
  return r;
}

} // namespace gdn::gpu_test
