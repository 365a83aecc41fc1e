#pragma once
#include <vector>

#include "reference/attention.h"
#include "reference/conv.h"
#include "reference/gdn2.h"
#include "reference/rule.h"
#include "trainer/cpu/ops.h"
#include "trainer/decode/states.h"

// The ops that know about other tokens, when the micro-batch brings states: each continues what the
// requests' earlier tokens left behind. Everything else about an op is as in training.
namespace gdn::trainer::cpu {

using reference::Sequences;

// Place of every token in its request.
std::vector<std::int64_t> positions_of(const SequenceStates& states, Sequences sequences);

template <class T>
void conv_states(const SequenceStates& states, reference::Activation activation, Sequences sequences, Mat<const T> x,
                 reference::ConstValues weight, reference::ConstValues bias, Mat<T> y);

// In chunks; token by token when every request has one token, or when the states in between are wanted.
// Statistics for a backward pass are then not written.
template <class T> void rule_states(const SequenceStates& states, const reference::RuleShape& shape, Sequences sequences, reference::RuleForward<T> p);
template <class T> void gdn2_states(const SequenceStates& states, const reference::RuleShape& shape, Sequences sequences, reference::Gdn2Forward<T> p);

// q [tokens, heads * d] of this pass over all keys of its request; k and v of this pass join the cache.
template <class T>
void attention_states(const SequenceStates& states, const reference::AttentionShape& shape, Sequences sequences, Mat<const T> q, Mat<const T> k,
                      Mat<const T> v, Mat<T> o, reference::Values lse);

} // namespace gdn::trainer::cpu
