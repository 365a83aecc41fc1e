// The gated delta rule token by token in double precision, and its adjoint by hand: what the
// chunked kernels are compared with. S <- e^g S; z = v - S^T k; u = beta z; S <- S + k u^T; o = s
// S^T q.
#pragma once
#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

namespace gdn::gpu_test {

struct RuleProblem {
  std::vector<int> lengths;
  int padding = 0; // rows behind the last sequence
  int key_heads = 1, group = 1, key_dim = 128, value_dim = 128;
  double scale = 1, epsilon = 1e-6;
  bool l2_norm = false;
  // [tokens, heads, width] and [tokens, heads]; states [sequences, heads, key_dim, value_dim]
  std::vector<double> q, k, v, g, beta, d_o;
  std::vector<double> initial, d_final; // empty: zero

  int value_heads() const { return key_heads * group; }
  int sequences() const { return static_cast<int>(lengths.size()); }
  int tokens() const {
    int n = padding;
    for (int l : lengths) n += l;
    return n;
  }
};

struct RuleResult {
  std::vector<double> o, final_state, dq, dk, dv, dg, dbeta, d_initial;
  std::vector<double> z, e; // prediction error, its adjoint; [tokens, value heads, value_dim]
  // What dg and dbeta are small differences of: |<dS, S>| + |k^T S dw|, and |e| |z| /
  // sqrt(value_dim).
  std::vector<double> dg_scale, dbeta_scale;
};

// One (sequence, value head). Its dq and dk are added to dq_sum, dk_sum [len, key_dim].
inline void rule_oracle_head(const RuleProblem& p, RuleResult& r, int sequence, int first, int head,
                             std::vector<double>& dq_sum, std::vector<double>& dk_sum) {
  const int K = p.key_dim, V = p.value_dim, n = p.lengths[sequence], hv = p.value_heads();
  const int hk = head / p.group, segment = 64;
  auto row = [&](const std::vector<double>& x, int t, int heads, int h, int width) {
    return x.data() + (static_cast<std::size_t>(first + t) * heads + h) * width;
  };
  auto normalised = [&](const std::vector<double>& x, int t, double* out) {
    const double* in = row(x, t, p.key_heads, hk, K);
    double sum = 0;
    for (int i = 0; i < K; ++i) sum += in[i] * in[i];
    const double rho = p.l2_norm ? 1 / std::sqrt(sum + p.epsilon) : 1;
    for (int i = 0; i < K; ++i) out[i] = in[i] * rho;
    return rho;
  };
  const std::size_t state_at = (static_cast<std::size_t>(sequence) * hv + head) * K * V;
  std::vector<double> S(K * V, 0.0);
  if (!p.initial.empty()) std::copy_n(p.initial.begin() + state_at, K * V, S.begin());
  std::vector<double> q(K), k(K), u(V);
  auto step = [&](int t, bool write) { // S_{t-1} -> S_t
    normalised(p.k, t, k.data());
    const double decay = std::exp(p.g[(first + t) * hv + head]);
    const double beta = p.beta[(first + t) * hv + head];
    const double* v = row(p.v, t, hv, head, V);
    for (int j = 0; j < V; ++j) u[j] = v[j];
    for (int i = 0; i < K; ++i)
      for (int j = 0; j < V; ++j) {
        S[i * V + j] *= decay;
        u[j] -= k[i] * S[i * V + j];
      }
    if (write) std::copy_n(u.begin(), V, r.z.begin() + (std::size_t(first + t) * hv + head) * V);
    for (int j = 0; j < V; ++j) u[j] *= beta;
    for (int i = 0; i < K; ++i)
      for (int j = 0; j < V; ++j) S[i * V + j] += k[i] * u[j];
    if (!write) return;
    normalised(p.q, t, q.data());
    double* o = r.o.data() + (std::size_t(first + t) * hv + head) * V;
    for (int j = 0; j < V; ++j) o[j] = 0;
    for (int i = 0; i < K; ++i)
      for (int j = 0; j < V; ++j) o[j] += p.scale * q[i] * S[i * V + j];
  };
  std::vector<std::vector<double>> checkpoints;
  for (int t = 0; t < n; ++t) {
    if (t % segment == 0) checkpoints.push_back(S);
    step(t, true);
  }
  std::copy_n(S.begin(), K * V, r.final_state.begin() + state_at);

  std::vector<double> dS(K * V, 0.0);
  if (!p.d_final.empty()) std::copy_n(p.d_final.begin() + state_at, K * V, dS.begin());
  std::vector<double> du(V), dw(V);
  std::vector<std::vector<double>> inside; // S_{t-1} of the segment, then S_t
  for (int c = static_cast<int>(checkpoints.size()) - 1; c >= 0; --c) {
    const int begin = c * segment, end = std::min(n, begin + segment);
    inside.clear();
    S = checkpoints[c];
    for (int t = begin; t < end; ++t) {
      inside.push_back(S);
      step(t, false);
    }
    inside.push_back(S);
    for (int t = end - 1; t >= begin; --t) {
      const std::vector<double>&before = inside[t - begin], &after = inside[t - begin + 1];
      const std::size_t at = static_cast<std::size_t>(first + t) * hv + head;
      const double decay = std::exp(p.g[at]), beta = p.beta[at];
      const double* d_o = row(p.d_o, t, hv, head, V);
      const double* z = r.z.data() + at * V;
      normalised(p.q, t, q.data());
      normalised(p.k, t, k.data());
      double* dq = dq_sum.data() + static_cast<std::size_t>(t) * K;
      double* dk = dk_sum.data() + static_cast<std::size_t>(t) * K;
      std::fill(du.begin(), du.end(), 0.0);
      for (int i = 0; i < K; ++i) {
        double along_q = 0, along_k = 0;
        for (int j = 0; j < V; ++j) {
          along_q += after[i * V + j] * d_o[j];
          dS[i * V + j] += p.scale * q[i] * d_o[j];
          along_k += dS[i * V + j] * beta * z[j];
          du[j] += dS[i * V + j] * k[i];
        }
        dq[i] += p.scale * along_q;
        dk[i] += along_k;
      }
      double d_beta = 0, d_g = 0, read = 0, written = 0, du_size = 0, z_size = 0;
      for (int j = 0; j < V; ++j) {
        d_beta += du[j] * z[j];
        du_size += du[j] * du[j];
        z_size += z[j] * z[j];
        r.dv[at * V + j] = beta * du[j];
        r.e[at * V + j] = du[j];
        dw[j] = -beta * du[j];
      }
      for (int i = 0; i < K; ++i) {
        double along = 0;
        for (int j = 0; j < V; ++j) {
          const double decayed = decay * before[i * V + j];
          along += decayed * dw[j];
          read += dS[i * V + j] * decayed;
          written += k[i] * dw[j] * decayed;
          dS[i * V + j] += k[i] * dw[j];
          d_g += dS[i * V + j] * decayed;
          dS[i * V + j] *= decay;
        }
        dk[i] += along;
      }
      r.dbeta[at] = d_beta;
      r.dg[at] = d_g;
      r.dg_scale[at] = std::abs(read) + std::abs(written);
      r.dbeta_scale[at] = std::sqrt(du_size * z_size / V);
    }
  }
  std::copy_n(dS.begin(), K * V, r.d_initial.begin() + state_at);
}

// Runs `head_work(result, sequence, first token, key head, dq sum, dk sum)` for every (sequence,
// key head) on all cores, and takes the summed dq, dk [len, key_dim] through the norm.
template <class Work>
RuleResult rule_by_heads(const RuleProblem& p, const Work& head_work) {
  const int hv = p.value_heads(), n = p.tokens(), K = p.key_dim;
  RuleResult r;
  const std::size_t states = std::size_t(p.sequences()) * hv * K * p.value_dim;
  r.final_state.assign(states, 0);
  r.d_initial.assign(states, 0);
  for (auto* x : {&r.o, &r.dv, &r.z, &r.e}) x->assign(std::size_t(n) * hv * p.value_dim, 0);
  for (auto* x : {&r.dg, &r.dbeta, &r.dg_scale, &r.dbeta_scale}) x->assign(std::size_t(n) * hv, 0);
  for (auto* x : {&r.dq, &r.dk}) x->assign(std::size_t(n) * p.key_heads * K, 0);
  struct Task {
    int sequence, first, key_head;
  };
  std::vector<Task> tasks;
  int first = 0;
  for (int s = 0; s < p.sequences(); first += p.lengths[s], ++s)
    for (int h = 0; h < p.key_heads; ++h) tasks.push_back({s, first, h});
  auto through_norm = [&](const Task& task, const std::vector<double>& x,
                          const std::vector<double>& d, std::vector<double>& out) {
    for (int t = 0; t < p.lengths[task.sequence]; ++t) {
      const std::size_t at = (std::size_t(task.first + t) * p.key_heads + task.key_head) * K;
      double sum = p.epsilon, along = 0;
      for (int i = 0; i < K; ++i) sum += x[at + i] * x[at + i];
      const double rho = 1 / std::sqrt(sum);
      for (int i = 0; i < K; ++i) along += d[std::size_t(t) * K + i] * x[at + i] * rho;
      for (int i = 0; i < K; ++i) {
        const double y = d[std::size_t(t) * K + i];
        out[at + i] = p.l2_norm ? rho * (y - along * x[at + i] * rho) : y;
      }
    }
  };
  auto work = [&](std::size_t begin, std::size_t stride) {
    for (std::size_t i = begin; i < tasks.size(); i += stride) {
      const Task& task = tasks[i];
      std::vector<double> dq(std::size_t(p.lengths[task.sequence]) * K, 0), dk(dq);
      head_work(r, task.sequence, task.first, task.key_head, dq, dk);
      through_norm(task, p.q, dq, r.dq);
      through_norm(task, p.k, dk, r.dk);
    }
  };
  const std::size_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> pool;
  for (std::size_t i = 0; i < threads; ++i) pool.emplace_back(work, i, threads);
  pool.clear();
  return r;
}

inline RuleResult rule_oracle(const RuleProblem& p) {
  return rule_by_heads(p, [&](RuleResult& r, int sequence, int first, int key_head,
                              std::vector<double>& dq, std::vector<double>& dk) {
    for (int h = 0; h < p.group; ++h)
      rule_oracle_head(p, r, sequence, first, key_head * p.group + h, dq, dk);
  });
}

} // namespace gdn::gpu_test
