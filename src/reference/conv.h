#pragma once
#include "reference/sequences.h"
#include "reference/view.h"

// Causal depthwise convolution over the tokens of each sequence, with or without SiLU. The last tap
// is the current token; taps before the sequence's first token read zero.
namespace gdn::reference {

enum class Activation { None, Silu };

// x [tokens, channels], weight [channels, taps], bias [1, channels] or absent -> y [tokens,
// channels].
template <class T>
void conv_forward(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                  ConstValues bias, Out<T> y);
// The pre-activation is recomputed from x. dweight [channels, taps] and dbias accumulate.
template <class T>
void conv_backward(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                   ConstValues bias, In<T> dy, Grad<T> dx, Values dweight, Values dbias);

// Decoding. A conv state is the last `taps` inputs of one request, [channels, taps], newest last; a
// pool is [slots * channels, taps], request i uses slot slots[i].
//
// State after a prefill, by sequence: the last `taps` rows of x, zeros before the first.
template <class T>
void conv_state_from(Sequences sequences, In<T> x, std::span<const int64> slots, Out<T> pool);
// Any number of tokens per request (prefill in pieces): conv_forward whose taps before the first token
// read the state of slots[i], which then moves on. With one token each it is conv_step.
template <class T>
void conv_continue(Activation activation, Sequences sequences, In<T> x, ConstValues weight,
                   ConstValues bias, std::span<const int64> slots, Out<T> pool, Out<T> y);
// One token per request: x, y [requests, channels]; shifts x into the states.
template <class T>
void conv_step(Activation activation, In<T> x, ConstValues weight, ConstValues bias,
               std::span<const int64> slots, Out<T> pool, Out<T> y);

} // namespace gdn::reference
