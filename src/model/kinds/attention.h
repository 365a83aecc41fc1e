#pragma once
#include <string>
#include <vector>

#include "model/builder.h"

// The ops of a full-attention mixer. R = rows (tokens) of this rank, heads are this rank's.
namespace gdn::model {

// RMSNorm of q or k: x [R * heads, d] (possibly strided) -> [R, heads, d]; attr.group columns share a
// statistic: d (per head), or all of a token's (whole vector). Backward reads x and the statistic.
TensorId head_norm(Builder& b, std::string name, TensorId x, ParamRef weight, NormAttr attr,
                   std::vector<std::int64_t> shape, std::string out);

// Rotates the first rotary_dim columns of every head, out of place. Backward rotates back: it reads
// the angles only, which are constants.
TensorId rope(Builder& b, std::string name, TensorId x, const AttentionAttr& attr, std::string out);

// softmax(q k^T / sqrt(d)) v, causal: q [R, n, d], k, v [R, g, d] -> attn [R, n, d]. The fused core keeps q, k,
// v, its output and one log-sum-exp a row and head (fp32); the unfused one the scores and the
// probabilities, [n, R, seq] each, and a mask where attr.dropout > 0.
// Over `cp` context-parallel ranks `cp_comm_type` says what moves. p2p: a ring passes k and v on, cp - 1 times, and
// their gradients with them in backward. all_gather: k and v of all ranks. a2a: ops of their own exchange tokens for
// heads, so the core sees whole sequences and heads / cp; it keeps what the exchange made, and its output
// exists twice (Transformer Engine, AttnFuncWithCPAndQKVOA2A). Throws Error{Config} for an unknown type, and for heads
// that do not divide.
TensorId core_attention(Builder& b, TensorId q, TensorId k, TensorId v, AttentionAttr attr, const std::string& cp_comm_type, std::int64_t cp);

// out = o * sigmoid(gate). Backward reads both. `gate` may be a strided view under another shape (one
// row a query group), with o's elements in o's order. Not compiled, the fp32 sigmoid is kept as well.
TensorId output_gate(Builder& b, std::string name, TensorId o, TensorId gate, std::string out, bool compiled = true);

} // namespace gdn::model
