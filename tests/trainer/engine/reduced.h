#pragma once
#include <algorithm>

#include "config/profiles.h"
#include "fixture.h"

// An example's model and run at a size that runs in milliseconds, with the same modules to choose from.
namespace gdn::trainer::fixture {

struct Reduced {
  config::Model model;
  config::Run run;
};

// Kept: layer kinds and their pattern, head ratios, every option of the model and of its stack. Shrunk:
// depth, widths, experts, vocabulary, tokens. Dropped: parallelism and what the example recomputes.
inline Reduced reduced(const config::ModelProfile& p, const std::string& stack, size_t layers = 4) {
  config::Model m = p.model;
  layers = std::min(m.mixers.size(), layers);
  m.mixers.resize(layers);
  m.mlps.resize(layers);
  m.hidden = 8;
  m.vocab = 16;
  m.gdn.value_heads = std::min<std::int64_t>(2, m.gdn.expansion());
  m.gdn.key_heads = 1;
  m.gdn.value_head_dim = m.gdn.value_head_dim > m.gdn.key_head_dim ? 8 : 4;
  m.gdn.key_head_dim = 4;
  const std::int64_t queries = std::min<std::int64_t>(2, m.attention.heads / std::max<std::int64_t>(1, m.attention.kv_heads));
  m.attention.kv_heads = std::min<std::int64_t>(2, m.attention.kv_heads);
  m.attention.heads = m.attention.kv_heads * std::max<std::int64_t>(1, queries);
  m.attention.head_dim = 8;
  m.moe.experts = std::min<std::int64_t>(m.moe.experts, 4);
  m.moe.top_k = std::min<std::int64_t>(m.moe.top_k, 2);
  m.moe.ffn = 8;
  m.moe.shared_ffn = std::min<std::int64_t>(m.moe.shared_ffn, 8);
  m.ffn = 8;
  m.mtp_layers = std::min<std::int64_t>(m.mtp_layers, 1);
  m.vision.reset();

  config::Run r = p.run;
  r.stack = stack;
  r.parallel = {};
  r.recompute = {};
  r.optimizer.gradient_dtype = DType::FP32; // main gradients in bf16 are priced, not executed
  r.seq = 6;
  r.micro_batch = 2; // two sequences, so that boundaries matter
  r.global_batch = 2;
  r.vocab_divisor = 0;
  r.vision = config::VisionMode::Absent;
  return {std::move(m), std::move(r)};
}

} // namespace gdn::trainer::fixture
