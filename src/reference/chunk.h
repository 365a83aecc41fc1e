#pragma once
#include <Eigen/Core>

#include "reference/rule.h"

// The mathematics of one chunk of 64 tokens and one value head, on matrices in the arithmetic type.
// Symbols: Lambda_ij = exp(gamma_i - gamma_j) for i >= j; Gamma = diag(exp gamma_i); Delta =
// diag(exp(gamma_C - gamma_i)); B = diag(beta). A chunk shorter than 64 is padded with rows q = k =
// v = do = 0, beta = 0, gamma = gamma of its last row: such rows change nothing, and every chunk
// has the same shape, so a token's result does not depend on what follows it.
namespace gdn::reference {

template <class A> using Matrix = Eigen::Matrix<A, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class A> using Column = Eigen::Matrix<A, kChunk, 1>;

// Shared by the value heads of one key head.
template <class A> struct ChunkKeys {
  Matrix<A> q, k;   // [64, dk]
  Matrix<A> qk, kk; // Q K^T, K K^T
  void multiply();  // qk and kk from q and k
};

template <class A> struct ChunkGates {
  Column<A> gamma, beta;
  Column<A> decay;     // exp gamma_i
  Column<A> tail;      // exp(gamma_C - gamma_i)
  A total = 1;         // exp gamma_C
  Matrix<A> lambda;    // [64, 64], zero above the diagonal
  void exponentiate(); // everything else from gamma: differences first, then masked, then exp
};

// T_raw = (I + stril(B K K^T))^-1, unit lower triangular. Gate-free: no exponential enters. Block
// forward substitution, 16 x 16 diagonal blocks merged to 64: all intermediates stay bounded.
template <class A>
void gate_free_inverse(const ChunkKeys<A>& keys, const Column<A>& beta, Matrix<A>& t_raw);

// U, and what both passes derive on the way.
template <class A> struct ChunkUpdate {
  Matrix<A> t;    // Lambda * T_raw
  Matrix<A> read; // Gamma K S0
  Matrix<A> r;    // V - Gamma K S0
  Matrix<A> u;    // T B R
  void compute(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const Matrix<A>& t_raw,
               const Matrix<A>& v, const Matrix<A>& s0);
};

// S1 = exp(gamma_C) S0 + (Delta K)^T U, in place.
template <class A>
void advance_state(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const Matrix<A>& u,
                   Matrix<A>& state);

// O = s (Gamma Q S0 + P U), P = tril(Q K^T) * Lambda.
template <class A>
void chunk_output(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const Matrix<A>& u,
                  const Matrix<A>& s0, A scale, Matrix<A>& o);

template <class A> struct ChunkGradients {
  Matrix<A> dq, dk, dv;
  Column<A> dg, dbeta;
  // d_state is dS1 on entry and dS0 on return. Rows of dg past the last token are meaningless.
  void compute(const ChunkKeys<A>& keys, const ChunkGates<A>& gates, const ChunkUpdate<A>& update,
               const Matrix<A>& s0, const Matrix<A>& d_o, A scale, Matrix<A>& d_state);
};

} // namespace gdn::reference
