#pragma once
#include <cstdint>
#include <span>

#include "trainer/op_call.h"

namespace gdn::trainer {

inline size_t as_size(std::int64_t i) { return static_cast<size_t>(i); }

constexpr Bytes kTensorAlignment = 256; // of every tensor of a pool and of a pass

// What a forward pass of one layer continues from, request by request, and leaves behind. The ops that
// know about other tokens (conv, rule, rope, core attention) look here; all others work row by row and
// need nothing. Sequence i of the micro-batch belongs to the request in slot slots[i], which has seen
// positions[i] tokens so far.
//
// One pool a layer, dense, newest contents of slot s in block s (Megatron-LM's and FLA's shapes, of one
// rank). The whole interface of a decode kernel: these pointers and the two index arrays, nothing about
// the order of requests.
struct SequenceStates {
  std::span<const std::int64_t> slots, positions; // [sequences]
  View conv;          // [slots * channels, taps], the run's dtype: the last inputs, newest last
  View recurrent;     // [slots * value_heads * key_dim, value_dim], fp32
  View keys, values;  // [slots * capacity, kv_heads * head_dim], the run's dtype; row p of a slot: token p
  std::int64_t capacity = 0; // tokens a slot holds
  // Optional: the states after every token of this pass (to go back to after a rejected draft).
  View token_conv;      // [tokens * channels, taps]
  View token_recurrent; // [tokens * value_heads * key_dim, value_dim], fp32
};

} // namespace gdn::trainer
