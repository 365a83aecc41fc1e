#pragma once
#include "reference/rule.h"

// GDN2, the delta rule with channel-wise gates (Megatron-LM, core/ssm/gated_delta_net/gdn2.py):
//
//   S_t = (I - k_t (b_t * k_t)^T) Diag(e^{g_t}) S_{t-1} + k_t (w_t * v_t)^T        o_t = s S_t^T
//   q_t
//
// g and the erase gate b act on key channels, the write gate w on value channels. b = w = beta and
// a g constant over the channels give the gated delta rule.
namespace gdn::reference {

template <class T> struct Gdn2Forward {
  Mat<const T> q, k;               // [tokens, key_heads * dk]
  Mat<const T> v;                  // [tokens, value_heads * dv]
  ConstValues g;                   // [tokens, value_heads * dk]
  Mat<const T> b;                  // [tokens, value_heads * dk]
  Mat<const T> w;                  // [tokens, value_heads * dv]
  Mat<const Acc<T>> initial_state; // [sequences * value_heads * dk, dv], absent: zero
  Mat<T> o;
  Mat<Acc<T>> final_state; // optional
  Values g_cum;            // optional, [tokens, value_heads * dk], sums inside chunks of 64
};

template <class T> struct Gdn2Backward {
  Mat<const T> q, k, v, b, w;
  ConstValues g;
  Mat<const Acc<T>> initial_state;
  Mat<const T> d_o;
  Mat<const Acc<T>> d_final_state;
  Grad<T> dq, dk, dv, db, dw;
  ValuesGrad dg;
  Mat<Acc<T>> d_initial_state;
};

template <class T>
void gdn2_forward(const RuleShape& shape, Sequences sequences, const Gdn2Forward<T>& p);
// Token recurrence backwards; the states of one head are rebuilt from one in 64.
template <class T>
void gdn2_backward(const RuleShape& shape, Sequences sequences, const Gdn2Backward<T>& p);

} // namespace gdn::reference
