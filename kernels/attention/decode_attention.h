#pragma once
#include "kernels/common/matrix.h"

// Attention of a few new tokens over keys and values that are kept by request: every request has a place (slot) in a
// cache of `capacity` tokens. All index arrays are device memory and nothing about a batch is known to the host, so a
// captured call serves any requests of its number of tokens. Token by token: a long prompt belongs into core.h.
namespace gdn::kernels {

struct AttentionCache {
  Bf16 *keys = nullptr, *values = nullptr; // [slots * capacity, kv_heads * dim]
  std::int64_t capacity = 0;
};

// Where the tokens of a call lie.
struct CachedTokens {
  std::int64_t tokens = 0;
  const std::int32_t* slots = nullptr;     // [tokens], of the token's request; negative: nobody, outputs are zero
  const std::int32_t* positions = nullptr; // [tokens], in the request, below capacity
};

// Rows of k, v [tokens, kv_heads * dim] to their places in the cache. Rows in eights of elements, on 16 bytes.
void append_to_cache(const CachedTokens& at, const Matrix& k, const Matrix& v, const AttentionCache& cache, const LaunchContext& context);

// o = softmax(q k^T / sqrt(dim)) v over keys 0 .. position of the token's request, which append_to_cache has put there.
// Query head h reads kv head h / (heads / kv_heads). bf16, fp32 in between; keys are divided and summed in an order that
// depends on the position alone, so every result is bitwise repeatable, whatever else is in the batch.
struct DecodeAttentionParams {
  CachedTokens at;
  int heads = 0, kv_heads = 0, dim = 0; // dim: a multiple of 8, at most 256
  Matrix q, o;                          // [tokens, heads * dim], on 16 bytes
  AttentionCache cache;
  float* lse = nullptr;                 // [tokens, heads], log of the sum of exponentials of the scaled scores; or null
};
void decode_attention(const DecodeAttentionParams& params, const LaunchContext& context);

} // namespace gdn::kernels
