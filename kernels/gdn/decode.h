#pragma once
#include <cstdint>

#include "kernels/common/launch.h"
#include "kernels/gdn/chunk_forward.h"

// The gated delta rule a few tokens at a time: every request continues from its own place (slot) in a
// pool of states, which is updated in place. All index arrays are device memory and nothing about the
// contents of a batch is known to the host, so a captured call serves any set of requests of its size.
// Prefill is gdn_chunk_forward with initial and final states; gdn_move_states takes those from and to
// the pool.
namespace gdn::kernels {

inline constexpr int kDecodeTaps = 4; // width of the convolution, inputs kept per channel

// The requests of one call. Their tokens are packed in the order of the requests.
struct GdnDecodeBatch {
  std::int64_t requests = 0, tokens = 0;
  const std::int32_t* cu_tokens = nullptr; // [requests + 1]; null: one token a request
  const std::int32_t* slots = nullptr;     // [requests], all different; negative: nobody, outputs are zero
};

// y = SiLU(bias + causal depthwise convolution of width 4), or without SiLU, continuing from the pool. Rows at strides in
// elements; channels contiguous and even in number; the pools on 16-byte boundaries.
struct GdnDecodeConvParams {
  GdnDecodeBatch batch;
  std::int64_t channels = 0;
  const Bf16* x = nullptr; // [tokens, channels]
  std::int64_t x_stride = 0;
  const Bf16* weight = nullptr; // [channels, 4], last tap is the current token
  const Bf16* bias = nullptr;   // [channels] or null
  Bf16* state = nullptr;        // [slots, channels, 4], the last inputs, newest last
  Bf16* y = nullptr;            // [tokens, channels]
  std::int64_t y_stride = 0;
  Bf16* token_state = nullptr; // [tokens, channels, 4], the state after every token, or null
  bool silu = true;
  // Channels of a slot in the pool and of a token in token_state, where these channels are some of them; 0: no others.
  std::int64_t state_channels = 0;
};
void gdn_decode_conv(const GdnDecodeConvParams& params, const LaunchContext& context);

// Per token and value head, with q and k divided by their norms first if `l2_norm`:
//   g = -exp(a_log) softplus(alpha + dt_bias);  beta = sigmoid(logit), twice that if `double_beta`
//   S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
// in fp32. Value head i reads key head i / (value_heads / key_heads). Widths: multiples of 8, the key's
// at most 256; strides multiples of 4 elements, addresses of 8 bytes, the pools' of 16.
struct GdnDecodeRuleParams {
  GdnDecodeBatch batch;
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  GdnTokens q, k; // [tokens, key_heads, key_dim]
  GdnTokens v;    // [tokens, value_heads, value_dim]
  const Bf16* beta_logits = nullptr; // [tokens, value_heads]
  std::int64_t beta_stride = 0;
  const Bf16* alpha = nullptr; // [tokens, value_heads]
  std::int64_t alpha_stride = 0;
  const float* a_log = nullptr;   // [value_heads]
  const float* dt_bias = nullptr; // [value_heads]
  bool double_beta = false;
  float scale = 1.0f; // of the read, key_dim^(-1/2) as a rule
  bool l2_norm = true;
  float l2_epsilon = 1e-6f;
  float* state = nullptr;       // [slots, value_heads, key_dim, value_dim]
  Bf16* o = nullptr;            // [tokens, value_heads, value_dim], contiguous
  float* token_state = nullptr; // [tokens, value_heads, key_dim, value_dim], after every token, or null
  // [tokens, value_heads]: gates that an op before has made. Then the four gate inputs above are not read.
  const float *g = nullptr, *beta = nullptr;
};
void gdn_decode_rule(const GdnDecodeRuleParams& params, const LaunchContext& context);

// Copies states between the pool [slots, elements] and `dense` [requests, elements], which prefill reads
// and writes. A negative slot reads as zeros and is not written. `elements` a multiple of 4.
struct GdnMoveStatesParams {
  float* pool = nullptr;
  float* dense = nullptr;
  const std::int32_t* slots = nullptr; // [requests]
  std::int64_t requests = 0, elements = 0;
  bool to_pool = false;
};
void gdn_move_states(const GdnMoveStatesParams& params, const LaunchContext& context);

} // namespace gdn::kernels
