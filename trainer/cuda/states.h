#pragma once
#include "kernels/gdn/conv.h"
#include "kernels/gdn/decode.h"
#include "trainer/cuda/ops.h"
#include "trainer/decode/states.h"

// The ops that know about other tokens, when the micro-batch brings states: each continues what the requests' earlier
// tokens left behind. Everything else about an op is as in training. Which kernels run depends on how many tokens the
// requests have, never on whose they are, so that a recorded pass serves other requests.
namespace gdn::trainer::cuda {

// Whether the rule goes token by token: every request has one token, or the states in between are wanted.
bool by_token(const OpCall& c);
kernels::GdnDecodeBatch decode_batch(const OpCall& c, Engine& e);

// y [T, n] of channels first .. first + n of the convolution.
void conv_states(const OpCall& c, Engine& e, const kernels::Conv& conv, std::int64_t first, const Matrix& y);

// The op CoreAttention: k and v of this pass join the cache.
void attention_states(const OpCall& c, Engine& e);

} // namespace gdn::trainer::cuda
