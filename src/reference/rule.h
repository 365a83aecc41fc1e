#pragma once
#include <cstddef>
#include <span>

#include "reference/l2norm.h"
#include "reference/sequences.h"
#include "reference/view.h"

// The gated delta rule, per value head with its key head's q and k:
//
//   u_t = beta_t (v_t - e^{g_t} S_{t-1}^T k_t)     S_t = e^{g_t} S_{t-1} + k_t u_t^T     o_t = s
//   S_t^T q_t
//
// in two forms: token by token (the definition) and in chunks of 64 (what kernels do). States are
// [dk, dv] per sequence and value head, as rows: [sequences * value_heads * dk, dv].
namespace gdn::reference {

inline constexpr int64 kChunk = 64;

struct RuleShape {
  int64 key_heads = 0;   // heads of q and k: Hk, or Hv when the caller has repeated them
  int64 value_heads = 0; // Hv, a multiple of key_heads
  int64 key_dim = 0, value_dim = 0;
  double scale = 0;    // of the read; 0: key_dim^(-1/2)
  bool l2norm = false; // normalise q and k inside
  double l2_eps = kL2NormEps;

  int64 repeat() const { return value_heads / key_heads; }
  double read_scale() const;
};

// T: q, k, v, o. Gates and statistics may have any dtype.
template <class T> struct RuleForward {
  Mat<const T> q, k;               // [tokens, key_heads * dk]
  Mat<const T> v;                  // [tokens, value_heads * dv]
  ConstValues g, beta;             // [tokens, value_heads]; g <= 0 is the log decay
  Mat<const Acc<T>> initial_state; // absent: zero
  Mat<T> o;                        // [tokens, value_heads * dv]
  Mat<Acc<T>> final_state;         // optional
  // Statistics for the backward pass, each optional.
  Values g_cum;          // [tokens, value_heads], running sum of g inside the chunk
  Mat<T> inverse;        // [tokens, value_heads * 64], rows of (I + stril(B K K^T))^-1
  Mat<T> q_norm, k_norm; // normalised q, k (l2norm only)
  Values q_rstd, k_rstd; // [tokens, key_heads] (l2norm only)
  Mat<T> chunk_states;   // [chunks * value_heads * dk, dv], state entering each chunk
};

template <class T> struct RuleBackward {
  Mat<const T> q, k; // as forward: raw if l2norm; absent if q_norm, k_norm are given
  Mat<const T> v;
  ConstValues g; // either g or g_cum
  ConstValues g_cum;
  ConstValues beta;
  Mat<const Acc<T>> initial_state;
  // What the forward kept; each is rebuilt when absent, to the same bits.
  Mat<const T> inverse, chunk_states;
  Mat<const T> q_norm, k_norm; // with q_rstd, k_rstd (l2norm only)
  ConstValues q_rstd, k_rstd;
  Mat<const T> d_o;
  Mat<const Acc<T>> d_final_state; // absent: zero
  Grad<T> dq, dk, dv;
  ValuesGrad dg, dbeta;         // [tokens, value_heads]
  Mat<Acc<T>> d_initial_state;  // optional, overwritten
  std::span<std::byte> scratch; // rule_backward_scratch_bytes; empty: allocated inside
};

// Rows past the last sequence are written as zeros in every output (or left alone by Accumulate).
//
// Token by token: the definition, without statistics. The backward pass exists in double only.
template <class T>
void rule_recurrent_forward(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p);
template <class T>
void rule_recurrent_backward(const RuleShape& shape, Sequences sequences, const RuleBackward<T>& p);
// In chunks.
template <class T>
void rule_chunk_forward(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p);
template <class T>
void rule_chunk_backward(const RuleShape& shape, Sequences sequences, const RuleBackward<T>& p);

// Bytes that rule_chunk_backward needs to rebuild the chunk states of one sequence and key head; 0
// when they were saved. `element` is the size of T.
int64 rule_backward_scratch_bytes(const RuleShape& shape, Sequences sequences, int64 element,
                                  bool states_saved);

// Any number of tokens per request, in chunks: rule_chunk_forward whose initial states are those of
// slots[i] of the pool, which then holds the final ones. p.initial_state and final_state are not used.
template <class T>
void rule_continue(const RuleShape& shape, Sequences sequences, const RuleForward<T>& p,
                   std::span<const int64> slots, Out<Acc<T>> pool);

// Decoding: one token per request; request i updates slot slots[i] of the pool
// [slots * value_heads * dk, dv]. p.initial_state, final_state and statistics are not used.
template <class T>
void rule_step(const RuleShape& shape, const RuleForward<T>& p, std::span<const int64> slots,
               Out<Acc<T>> pool);

} // namespace gdn::reference
