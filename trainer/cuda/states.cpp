#include "trainer/cuda/states.h"

#include <algorithm>

#include "kernels/attention/core.h"
#include "kernels/attention/decode_attention.h"

namespace gdn::trainer::cuda {

using kernels::Bf16;

namespace {

bool one_token_each(const MicroBatch& b) {
  for (size_t s = 0; s + 1 < b.sequences.size(); ++s)
    if (b.sequences[s + 1] - b.sequences[s] != 1) return false;
  return true;
}

Matrix columns(Matrix m, std::int64_t first, std::int64_t count) {
  m.data = static_cast<char*>(m.data) + first * size_of(m.dtype);
  m.cols = count;
  return m;
}

} // namespace

bool by_token(const OpCall& c) { return c.batch().states->token_recurrent || one_token_each(c.batch()); }

kernels::GdnDecodeBatch decode_batch(const OpCall& c, Engine& e) {
  const DeviceBatch& b = e.batch(c);
  return {b.sequences, b.tokens, one_token_each(c.batch()) ? nullptr : b.cu_tokens, b.slots};
}

void conv_states(const OpCall& c, Engine& e, const kernels::Conv& conv, std::int64_t first, const Matrix& y) {
  const SequenceStates& states = *c.batch().states;
  const Matrix x = columns(conv.x, first, y.cols);
  kernels::GdnDecodeConvParams p;
  p.batch = decode_batch(c, e);
  p.channels = y.cols;
  p.x = static_cast<const Bf16*>(x.data);
  p.x_stride = x.stride;
  p.weight = static_cast<const Bf16*>(conv.weight.data) + first * kernels::kDecodeTaps;
  if (conv.bias.data) p.bias = static_cast<const Bf16*>(conv.bias.data) + first;
  p.state = data<Bf16>(states.conv) + first * kernels::kDecodeTaps;
  p.state_channels = conv.x.cols;
  p.y = static_cast<Bf16*>(y.data);
  p.y_stride = y.stride;
  if (states.token_conv) p.token_state = data<Bf16>(states.token_conv) + first * kernels::kDecodeTaps;
  p.silu = conv.silu;
  kernels::gdn_decode_conv(p, e.launch());
}

// Requests that all begin here see nothing but this pass: the tiled kernel does.
void attention_states(const OpCall& c, Engine& e) {
  const auto& a = c.attr<model::AttentionAttr>();
  const SequenceStates& states = *c.batch().states;
  const DeviceBatch& b = e.batch(c);
  auto rows = [&](const View& v) { return matrix(with_rows(c, v, b.tokens)); };
  const kernels::CachedTokens at{b.tokens, b.token_slots, b.local_positions};
  const kernels::AttentionCache cache{data<Bf16>(states.keys), data<Bf16>(states.values), states.capacity};
  const Matrix q = rows(c.in(0)), k = rows(c.in(1)), v = rows(c.in(2)), o = rows(c.out(0));
  float* const lse = data<float>(c.out(1));
  const int heads = static_cast<int>(a.heads), kv_heads = static_cast<int>(a.kv_heads), dim = static_cast<int>(a.head_dim);
  kernels::append_to_cache(at, k, v, cache, e.launch());
  const bool begins = std::all_of(states.positions.begin(), states.positions.end(), [](std::int64_t p) { return p == 0; });
  if (begins && !one_token_each(c.batch()))
    return kernels::attention_forward({{b.tokens, b.sequences, heads, kv_heads, dim, b.table}, q, k, v, o, lse}, e.launch());
  kernels::decode_attention({at, heads, kv_heads, dim, q, o, cache, lse}, e.launch());
}

} // namespace gdn::trainer::cuda
