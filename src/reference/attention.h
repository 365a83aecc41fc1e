#pragma once
#include <span>

#include "reference/sequences.h"
#include "reference/view.h"

// Causal grouped-query attention and rotary embedding. The q/k norm is rms_norm_* over heads (or
// over the whole vector), the output gate is sigmoid_gate_* of mlp.h.
namespace gdn::reference {

struct AttentionShape {
  int64 heads = 0, kv_heads = 0, head_dim = 0;
  double scale = 0; // 0: head_dim^(-1/2)
};

// Rows of q and rows of k, v. With context parallelism a rank holds some queries and all keys:
// positions[i] is then the place of query row i in its sequence; empty: counted from its first row.
struct AttentionRows {
  Sequences queries, keys;
  std::span<const int64> positions = {};
};

// q, o [queries, heads * d]; k, v [keys, kv_heads * d]; lse [queries, heads], natural logarithm of
// the sum of exponentials of the scaled scores. Query head h reads kv head h / (heads / kv_heads).
template <class T>
void attention_forward(const AttentionShape& shape, const AttentionRows& rows, In<T> q, In<T> k,
                       In<T> v, Out<T> o, Values lse);

template <class T> struct AttentionBackward {
  Mat<const T> q, k, v, o;
  ConstValues lse; // absent: recomputed
  Mat<const T> d_o;
  Grad<T> dq, dk, dv;
};
template <class T>
void attention_backward(const AttentionShape& shape, const AttentionRows& rows,
                        const AttentionBackward<T>& p);

// Rotates the first `rotary` channels of every head, halves paired (i, i + rotary/2), by the angle
// position * theta^(-2i/rotary). `inverse` rotates back: the backward pass.
struct Rope {
  int64 head_dim = 0, rotary = 0;
  double theta = 1e7;
  bool inverse = false;
};
template <class T>
void rope(const Rope& r, Sequences sequences, std::span<const int64> positions, In<T> x, Grad<T> y);

} // namespace gdn::reference
