#pragma once
#include "kernels/common/matrix.h"
#include "kernels/gdn/shape.h"

// Causal attention over packed sequences with grouped queries, in tiles of 64 tokens:
//   o = softmax(q k^T / sqrt(dim)) v, query head h reads kv head h / (heads / kv_heads).
// bf16, fp32 accumulation; nothing is summed by atomics, so every result is bitwise repeatable.
namespace gdn::kernels {

struct AttentionShape {
  std::int64_t tokens = 0, sequences = 0;
  int heads = 0, kv_heads = 0, dim = 0; // dim: a multiple of 8, at most 256
  GdnChunkTable table = {};             // of this packing: the tiles of every sequence
};

// q, o [tokens, heads * dim]; k, v [tokens, kv_heads * dim]; lse [tokens, heads] fp32, contiguous: log of the
// sum of exponentials of the scaled scores.
struct AttentionForwardParams {
  AttentionShape shape;
  Matrix q, k, v, o;
  float* lse = nullptr;
};
void attention_forward(const AttentionForwardParams& params, const LaunchContext& context);

struct AttentionBackwardParams {
  AttentionShape shape;
  Matrix q, k, v, o;
  const float* lse = nullptr;
  Matrix d_o;
  Gradient dq, dk, dv;
};
void attention_backward(const AttentionBackwardParams& params, const LaunchContext& context);
// Log-sum-exp and o . d_o of every row, tile by tile.
constexpr std::int64_t attention_backward_scratch(std::int64_t tokens, std::int64_t sequences, std::int64_t heads) {
  return gdn_chunk_capacity(tokens, sequences) * heads * kChunk * 8;
}

} // namespace gdn::kernels
