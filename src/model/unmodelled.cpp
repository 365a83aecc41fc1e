#include <fmt/core.h>

#include "core/error.h"
#include "model/parameter_layers.h"

// Mixers without an op list. Their parameters are exact (models with published totals), nothing
// else is predicted, so they are not sharded either.
namespace gdn::model {

namespace {

std::int64_t size_of_model(const config::Model& m, const char* key) {
  auto it = m.unmodelled_sizes.find(key);
  if (it == m.unmodelled_sizes.end())
    throw Error(ErrorCode::Config, fmt::format("model '{}' ({} layers) lacks unmodelled_sizes.{}",
                                               m.name, m.unmodelled_kind, key));
  return it->second;
}

void add_whole(ParameterList& list, const char* local, std::vector<std::int64_t> shape) {
  list.add(local, std::move(shape), ShardRule::Replicated);
}

} // namespace

// Kimi-Linear's Kimi Delta Attention: per-channel decay and output gate through low-rank pairs.
void add_kda(ParameterList& list, const config::Model& m) {
  const config::GdnShape& s = m.gdn;
  const std::int64_t h = m.hidden, rank = size_of_model(m, "low_rank");
  add_whole(list, "kda.qkv_proj", {2 * s.qk() + s.v(), h});
  add_whole(list, "kda.conv1d", {s.conv_channels(), 1, s.conv_kernel});
  add_whole(list, "kda.A_log", {s.key_heads});
  add_whole(list, "kda.decay_down", {rank, h});
  add_whole(list, "kda.decay_up", {s.qk(), rank});
  add_whole(list, "kda.dt_bias", {s.qk()});
  add_whole(list, "kda.beta_proj", {s.value_heads, h});
  add_whole(list, "kda.gate_down", {rank, h});
  add_whole(list, "kda.gate_up", {s.v(), rank});
  add_whole(list, "kda.out_norm", {s.value_head_dim});
  add_whole(list, "kda.out_proj", {h, s.v()});
}

// Multi-head latent attention without a query rank; the rotary dims exist in shape only (NoPE).
void add_mla(ParameterList& list, const config::Model& m) {
  const std::int64_t h = m.hidden, n = m.attention.heads;
  const std::int64_t rank = size_of_model(m, "mla_kv_rank"),
                     nope = size_of_model(m, "mla_nope_dim");
  const std::int64_t rope = size_of_model(m, "mla_rope_dim"),
                     value = size_of_model(m, "mla_value_dim");
  add_whole(list, "mla.q_proj", {n * (nope + rope), h});
  add_whole(list, "mla.kv_down", {rank + rope, h});
  add_whole(list, "mla.kv_norm", {rank});
  add_whole(list, "mla.kv_up", {n * (nope + value), rank});
  add_whole(list, "mla.out_proj", {h, n * value});
}

// Jet-Nemotron's JetBlock: a generated (dynamic) convolution on v only.
void add_jet_block(ParameterList& list, const config::Model& m) {
  const config::GdnShape& s = m.gdn;
  const std::int64_t h = m.hidden, width = s.v() / size_of_model(m, "generator_divisor");
  add_whole(list, "jet.qk_proj", {2 * s.qk(), h});
  add_whole(list, "jet.v_proj", {s.v(), h});
  add_whole(list, "jet.ab_proj", {2 * s.value_heads, h});
  add_whole(list, "jet.A_log", {s.value_heads});
  add_whole(list, "jet.dt_bias", {s.value_heads});
  add_whole(list, "jet.generator_down", {width, h});
  add_whole(list, "jet.generator_up", {s.conv_kernel * s.v(), width});
  add_whole(list, "jet.generator_bias", {s.conv_kernel * s.v()});
  add_whole(list, "jet.gate_proj", {s.v(), h});
  add_whole(list, "jet.out_norm", {s.value_head_dim});
  add_whole(list, "jet.out_proj", {h, s.v()});
}

} // namespace gdn::model
