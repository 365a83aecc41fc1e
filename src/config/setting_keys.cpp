#include <cmath>

#include <fmt/core.h>

#include "config/run_io.h"

// Rows of the run-key table for StackSettings: what only the stack's own checks read.
namespace gdn::config {

namespace {

// "2.14.0", or nothing where the package is not installed.
std::string version(const Node& v) {
  if (is_none(v)) return "";
  std::string text = as_string(v);
  for (char c : text)
    if (!((c >= '0' && c <= '9') || c == '.' || (c >= 'a' && c <= 'z') || c == '+'))
      v.fail(fmt::format("'{}' is not a version", text.substr(0, 60)), "write a version such as 2.14.0, or null");
  return text;
}

// Kept as written: the stack checks the type of these itself.
std::optional<std::string> raw(const Node& v) {
  if (is_none(v)) return std::nullopt;
  if (v.kind == Node::Kind::Scalar) return v.text;
  std::string out = "[";
  for (const std::string& s : as_strings(v)) out += (out.size() > 1 ? ", " : "") + s;
  return out + "]";
}

Node text_node(const std::string& text) { return text.empty() ? Node{} : string_node(text); }
Node raw_node(const std::optional<std::string>& text) { return text ? string_node(*text) : Node{}; }

} // namespace

void append_setting_keys(std::vector<RunKey>& keys) {
  constexpr std::int64_t kMax = std::int64_t{1} << 50;
  // clang-format off
  const RunKey rows[] = {
      {"te_version", "version, or null", "Transformer Engine; null: not installed", false, true,
       [](Run& r, const Node& v) { r.settings.te_version = version(v); }, [](const Run& r) { return text_node(r.settings.te_version); }},
      {"fla_version", "version, or null", "flash-linear-attention", false, true,
       [](Run& r, const Node& v) { r.settings.fla_version = version(v); }, [](const Run& r) { return text_node(r.settings.fla_version); }},
      {"torch_version", "version, or null", "PyTorch", false, true,
       [](Run& r, const Node& v) { r.settings.torch_version = version(v); }, [](const Run& r) { return text_node(r.settings.torch_version); }},
      {"multi_latent_attention", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.multi_latent_attention = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.multi_latent_attention); }},
      {"enable_mhc_connections", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.enable_mhc_connections = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.enable_mhc_connections); }},
      {"mhc_recompute_layer_num", "as the stack takes it", "", true, true,
       [](Run& r, const Node& v) { r.settings.mhc_recompute_layer_num = raw(v); }, [](const Run& r) { return raw_node(r.settings.mhc_recompute_layer_num); }},
      {"fp32_residual_connection", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.fp32_residual_connection = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.fp32_residual_connection); }},
      {"fused_single_qkv_rope", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.fused_single_qkv_rope = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.fused_single_qkv_rope); }},
      {"activation", "name", "activation after the convolution", false, true,
       [](Run& r, const Node& v) { r.settings.activation = as_string(v); }, [](const Run& r) { return string_node(r.settings.activation); }},
      {"linear_attention_freq", "as the stack takes it", "null: from the model", true, true,
       [](Run& r, const Node& v) { r.settings.linear_attention_freq = raw(v); }, [](const Run& r) { return raw_node(r.settings.linear_attention_freq); }},
      {"expandable_segments", "true | false", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", false, true,
       [](Run& r, const Node& v) { r.settings.expandable_segments = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.expandable_segments); }},
      {"moe_probs_at_unpermute", "true | false", "probabilities applied in unpermute (before core 0.13), not in the activation", false, true,
       [](Run& r, const Node& v) { r.settings.moe_probs_at_unpermute = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.moe_probs_at_unpermute); }},
      {"moe_layer_recompute", "true | false", "deprecated spelling of the module moe", true, true,
       [](Run& r, const Node& v) { r.settings.moe_layer_recompute = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.moe_layer_recompute); }},
      {"autograd_grad", "true | false", "gradients are taken by torch.autograd.grad", false, true,
       [](Run& r, const Node& v) { r.settings.autograd_grad = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.autograd_grad); }},
      {"min_offloaded_tensor_size", "integer", "elements", true, true,
       [](Run& r, const Node& v) { r.settings.min_offloaded_tensor_size = as_int(v, -kMax, kMax); }, [](const Run& r) { return number_node(r.settings.min_offloaded_tensor_size); }},
      {"activation_offload_fraction", "number", "", true, true,
       [](Run& r, const Node& v) { r.settings.activation_offload_fraction = as_double(v, -HUGE_VAL, HUGE_VAL); }, [](const Run& r) { return number_node(r.settings.activation_offload_fraction); }},
      {"delta_offload_bytes_across_pp_ranks", "integer", "", true, true,
       [](Run& r, const Node& v) { r.settings.delta_offload_bytes_across_pp_ranks = as_int(v, -kMax, kMax); }, [](const Run& r) { return number_node(r.settings.delta_offload_bytes_across_pp_ranks); }},
      {"max_inflight_offloads", "integer, or null", "", true, true,
       [](Run& r, const Node& v) { if (is_none(v)) r.settings.max_inflight_offloads.reset(); else r.settings.max_inflight_offloads = as_int(v, -kMax, kMax); },
       [](const Run& r) { return r.settings.max_inflight_offloads ? number_node(*r.settings.max_inflight_offloads) : Node{}; }},
      {"use_transformer_engine_op_fuser", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.use_transformer_engine_op_fuser = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.use_transformer_engine_op_fuser); }},
      {"moe_paged_stash", "true | false", "", true, true,
       [](Run& r, const Node& v) { r.settings.moe_paged_stash = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.moe_paged_stash); }},
      {"moe_expert_rank_capacity_factor", "number, or null", "", true, true,
       [](Run& r, const Node& v) { if (is_none(v)) r.settings.moe_expert_rank_capacity_factor.reset(); else r.settings.moe_expert_rank_capacity_factor = as_double(v, 0, 1e6); },
       [](const Run& r) { return r.settings.moe_expert_rank_capacity_factor ? number_node(*r.settings.moe_expert_rank_capacity_factor) : Node{}; }},
      {"moe_flex_dispatcher_backend", "deepep | hybridep | ncclep", "", true, true,
       [](Run& r, const Node& v) { r.settings.moe_flex_dispatcher_backend = as_choice(v, {"deepep", "hybridep", "ncclep"}); }, [](const Run& r) { return string_node(r.settings.moe_flex_dispatcher_backend); }},
      {"cuda_graph_warmup_steps", "integer", "", true, true,
       [](Run& r, const Node& v) { r.settings.cuda_graph_warmup_steps = as_int(v, -kMax, kMax); }, [](const Run& r) { return number_node(r.settings.cuda_graph_warmup_steps); }},
      {"gtp", "integer >= 1", "tensor-parallel sharding of weights", false, true,
       [](Run& r, const Node& v) { r.settings.gtp = as_int(v, 1, 1 << 20); }, [](const Run& r) { return number_node(r.settings.gtp); }},
      {"moe_input_jitter_eps", "number, or null", "", true, true,
       [](Run& r, const Node& v) { if (is_none(v)) r.settings.moe_input_jitter_eps.reset(); else r.settings.moe_input_jitter_eps = as_double(v, 0, 1e6); },
       [](const Run& r) { return r.settings.moe_input_jitter_eps ? number_node(*r.settings.moe_input_jitter_eps) : Node{}; }},
      {"linear_cp_mode", "chunkwise | headwise", "revision dev only", true, true,
       [](Run& r, const Node& v) { r.settings.linear_cp_mode = as_choice(v, {"chunkwise", "headwise"}); }, [](const Run& r) { return string_node(r.settings.linear_cp_mode); }},
      {"cp_partition", "zigzag | contiguous", "revision dev only", false, true,
       [](Run& r, const Node& v) { r.settings.cp_partition = as_choice(v, {"zigzag", "contiguous"}); }, [](const Run& r) { return string_node(r.settings.cp_partition); }},
      {"conv_pad_alignment", "true | false", "", false, true,
       [](Run& r, const Node& v) { r.settings.conv_pad_alignment = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.conv_pad_alignment); }},
      {"packed", "true | false", "packed sequences (cu_seqlens)", false, true,
       [](Run& r, const Node& v) { r.settings.packed = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.packed); }},
      {"compiled", "true | false", "torch.compile on gates, gated norm and output gate", false, true,
       [](Run& r, const Node& v) { r.settings.compiled = as_bool(v); }, [](const Run& r) { return bool_node(r.settings.compiled); }},
  };
  // clang-format on
  keys.insert(keys.end(), std::begin(rows), std::end(rows));
}

} // namespace gdn::config
