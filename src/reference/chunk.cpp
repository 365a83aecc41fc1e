#include "reference/chunk.h"

#include <algorithm>
#include <cmath>

#include "reference/product.h"

namespace gdn::reference {
namespace {

template <class A> Matrix<A> transpose(const Matrix<A>& m) { return m.transpose(); }

// out += factor * a b. Transposed operands are copied, so that Eigen's product is compiled once.
template <class A> void add_nn(A factor, const Matrix<A>& a, const Matrix<A>& b, Matrix<A>& out) {
  tile_product(a.rows(), b.cols(), a.cols(), factor, a.data(), b.data(), out.data());
}
template <class A> void add_nt(A factor, const Matrix<A>& a, const Matrix<A>& b, Matrix<A>& out) {
  add_nn(factor, a, transpose(b), out);
}
template <class A> void add_tn(A factor, const Matrix<A>& a, const Matrix<A>& b, Matrix<A>& out) {
  add_nn(factor, transpose(a), b, out);
}
template <class A> Matrix<A> nn(const Matrix<A>& a, const Matrix<A>& b) {
  Matrix<A> out = Matrix<A>::Zero(a.rows(), b.cols());
  add_nn(A(1), a, b, out);
  return out;
}
template <class A> Matrix<A> nt(const Matrix<A>& a, const Matrix<A>& b) {
  return nn(a, transpose(b));
}
template <class A> Matrix<A> tn(const Matrix<A>& a, const Matrix<A>& b) {
  return nn(transpose(a), b);
}

// Row i of m times factor(i).
template <class A> Matrix<A> rows_times(const Column<A>& factor, const Matrix<A>& m) {
  Matrix<A> out(m.rows(), m.cols());
  for (int64 i = 0; i < m.rows(); ++i) out.row(i) = factor(i) * m.row(i);
  return out;
}
template <class A> Matrix<A> times(const Matrix<A>& a, const Matrix<A>& b) {
  return a.cwiseProduct(b);
}

} // namespace

template <class A> void ChunkKeys<A>::multiply() {
  qk = nt(q, k);
  kk = nt(k, k);
}

template <class A> void ChunkGates<A>::exponentiate() {
  const A last = gamma(kChunk - 1);
  lambda.setZero(kChunk, kChunk);
  for (int64 i = 0; i < kChunk; ++i) {
    decay(i) = std::exp(gamma(i));
    tail(i) = std::exp(last - gamma(i));
    for (int64 j = 0; j <= i; ++j) lambda(i, j) = std::exp(gamma(i) - gamma(j));
  }
  total = std::exp(last);
}

namespace {

constexpr int64 kDiagonal = 16; // block that is solved row by row

// T of rows and columns first .. first + n - 1, n a power of two times kDiagonal.
template <class A> void invert_block(const Matrix<A>& m, int64 first, int64 n, Matrix<A>& t) {
  if (n == kDiagonal) {
    for (int64 i = 0; i < n; ++i) {
      t(first + i, first + i) = 1;
      for (int64 j = 0; j < i; ++j) {
        A sum = m(first + i, first + j);
        for (int64 l = j + 1; l < i; ++l) sum += m(first + i, first + l) * t(first + l, first + j);
        t(first + i, first + j) = -sum;
      }
    }
    return;
  }
  const int64 half = n / 2, second = first + half;
  invert_block(m, first, half, t);
  invert_block(m, second, half, t);
  Matrix<A> product(half, half); // M21 T11, then T21 = -T22 M21 T11
  for (int64 i = second; i < second + half; ++i) {
    A row[kChunk] = {};
    for (int64 l = first; l < second; ++l)
      for (int64 j = first; j <= l; ++j) row[j - first] += m(i, l) * t(l, j);
    std::copy(row, row + half, product.data() + (i - second) * half);
  }
  for (int64 i = second; i < second + half; ++i)
    for (int64 l = second; l <= i; ++l)
      for (int64 j = 0; j < half; ++j) t(i, first + j) -= t(i, l) * product(l - second, j);
}

} // namespace

template <class A>
void gate_free_inverse(const ChunkKeys<A>& keys, const Column<A>& beta, Matrix<A>& t_raw) {
  Matrix<A> m = Matrix<A>::Zero(kChunk, kChunk);
  for (int64 i = 0; i < kChunk; ++i)
    for (int64 j = 0; j < i; ++j) m(i, j) = beta(i) * keys.kk(i, j);
  t_raw.setZero(kChunk, kChunk);
  invert_block(m, 0, kChunk, t_raw);
}

template <class A>
void ChunkUpdate<A>::compute(const ChunkKeys<A>& keys, const ChunkGates<A>& gates,
                             const Matrix<A>& t_raw, const Matrix<A>& v, const Matrix<A>& s0) {
  t = times(gates.lambda, t_raw);
  read = rows_times(gates.decay, nn(keys.k, s0));
  r = v - read;
  u = nn(t, rows_times(gates.beta, r));
}

template <class A>
void advance_state(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const Matrix<A>& u,
                   Matrix<A>& state) {
  state *= gates.total;
  add_tn(A(1), keys.k, rows_times(gates.tail, u), state);
}

template <class A>
void chunk_output(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const Matrix<A>& u,
                  const Matrix<A>& s0, A scale, Matrix<A>& o) {
  o = rows_times(gates.decay, nn(keys.q, s0));
  add_nn(A(1), times(keys.qk, gates.lambda), u, o);
  o *= scale;
}

template <class A>
void ChunkGradients<A>::compute(const ChunkKeys<A>& keys, const ChunkGates<A>& gates,
                                const ChunkUpdate<A>& update, const Matrix<A>& s0,
                                const Matrix<A>& d_o, A scale, Matrix<A>& d_state) {
  const auto& [q, k, qk, kk] = keys;
  const auto& [t, read, r, u] = update;
  const auto& lambda = gates.lambda;

  const Matrix<A> fed = rows_times(gates.tail, nn(k, d_state)); // Delta K dS1
  Matrix<A> du = fed;
  add_tn(scale, times(qk, lambda), d_o, du);
  const Matrix<A> e = tn(t, du);  // before beta: dividing dR by beta would fail for beta -> 0
  dv = rows_times(gates.beta, e); // dR = dV

  // Gradients of M (negated) and of the raw products Q K^T and K K^T.
  const Matrix<A> minus_dm = nt(e, u);
  Matrix<A> da = nt(d_o, u), dkk = Matrix<A>::Zero(kChunk, kChunk), w = dkk;
  for (int64 i = 0; i < kChunk; ++i) {
    A sum = 0;
    for (int64 j = 0; j < r.cols(); ++j) sum += e(i, j) * r(i, j);
    for (int64 j = 0; j < kChunk; ++j) da(i, j) *= scale * lambda(i, j);
    for (int64 j = 0; j < i; ++j) {
      const A dm = -minus_dm(i, j) * lambda(i, j);
      sum += dm * kk(i, j);
      dkk(i, j) = dm * gates.beta(i);
      w(i, j) = da(i, j) * qk(i, j) + dkk(i, j) * kk(i, j);
    }
    dbeta(i) = sum;
  }

  dq = rows_times(gates.decay, nt(d_o, s0));
  dq *= scale;
  const Matrix<A> dq_state = dq;
  add_nn(A(1), da, k, dq);
  dk = rows_times(gates.tail, nt(u, d_state));
  dk -= rows_times(gates.decay, nt(dv, s0));
  add_tn(A(1), da, q, dk);
  add_nn(A(1), dkk, k, dk);
  add_tn(A(1), dkk, k, dk);

  // Gate gradient from straddling pairs: g_t appears in an exponential exactly when the pair
  // straddles t, so no term enters that another has to cancel.
  A c = 0; // through exp gamma_C: total * <S0, dS1>
  for (int64 i = 0; i < s0.rows(); ++i)
    for (int64 j = 0; j < s0.cols(); ++j) c += s0(i, j) * d_state(i, j);
  c *= gates.total;
  Column<A> y, z; // through exp gamma_i and exp(gamma_C - gamma_i)
  for (int64 i = 0; i < kChunk; ++i) {
    y(i) = z(i) = 0;
    for (int64 j = 0; j < q.cols(); ++j) y(i) += q(i, j) * dq_state(i, j);
    for (int64 j = 0; j < u.cols(); ++j) y(i) -= dv(i, j) * read(i, j);
    for (int64 j = 0; j < u.cols(); ++j) z(i) += u(i, j) * fed(i, j);
  }
  Column<A> prefix = Column<A>::Zero(); // of row i of W, columns before n
  A before = 0;                         // sum of z over i < n
  for (int64 n = 0; n < kChunk; ++n) {
    A sum = c + before;
    for (int64 i = n; i < kChunk; ++i) sum += y(i) + prefix(i);
    dg(n) = sum;
    before += z(n);
    for (int64 i = n + 1; i < kChunk; ++i) prefix(i) += w(i, n);
  }

  d_state *= gates.total;
  add_tn(scale, q, rows_times(gates.decay, d_o), d_state);
  add_tn(A(-1), k, rows_times(gates.decay, dv), d_state);
}

#define GDN_CHUNK(A)                                                                               \
  template struct ChunkKeys<A>;                                                                    \
  template struct ChunkGates<A>;                                                                   \
  template struct ChunkUpdate<A>;                                                                  \
  template struct ChunkGradients<A>;                                                               \
  template void gate_free_inverse<A>(const ChunkKeys<A>&, const Column<A>&, Matrix<A>&);           \
  template void advance_state<A>(const ChunkKeys<A>&, const ChunkGates<A>&, const Matrix<A>&,      \
                                 Matrix<A>&);                                                      \
  template void chunk_output<A>(const ChunkKeys<A>&, const ChunkGates<A>&, const Matrix<A>&,       \
                                const Matrix<A>&, A, Matrix<A>&);
GDN_CHUNK(float)
GDN_CHUNK(double)
#undef GDN_CHUNK

} // namespace gdn::reference
