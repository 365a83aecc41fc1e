#pragma once
#include <cstdint>
#include <optional>
#include <string>

// Settings of the target stack that no prediction reads (but `compiled`), but that its own configuration
// checks do (src/model/validate). Names and defaults are Megatron-LM's; a key of the `settings:` block.
namespace gdn::config {

struct StackSettings {
  // What is installed; versions as "2.14.0", empty: not installed.
  std::string te_version = "2.14.0";
  std::string fla_version = "0.5.1";
  std::string torch_version = "2.11.0";

  // Model options these models leave off.
  bool multi_latent_attention = false;
  bool enable_mhc_connections = false;
  std::optional<std::string> mhc_recompute_layer_num = {};  // as written: an integer >= 1
  bool fp32_residual_connection = false;
  bool fused_single_qkv_rope = false;
  std::string activation = "silu";
  std::optional<std::string> linear_attention_freq = {}; // as written: "4" or "[1, 1, 1, 0]"

  // Megatron-LM before core 0.13 multiplied the experts' outputs by their probabilities in unpermute,
  // which keeps both. Read by the op lists.
  bool moe_probs_at_unpermute = false;

  // Recompute.
  bool moe_layer_recompute = false;    // deprecated spelling of the module `moe`
  bool autograd_grad = false;          // gradients are taken by torch.autograd.grad, not .backward()

  // Offload.
  std::int64_t min_offloaded_tensor_size = 1048576; // elements
  double activation_offload_fraction = 1;
  std::int64_t delta_offload_bytes_across_pp_ranks = 0;
  std::optional<std::int64_t> max_inflight_offloads = {};
  bool use_transformer_engine_op_fuser = false;
  bool moe_paged_stash = false;
  std::optional<double> moe_expert_rank_capacity_factor = {};
  std::string moe_flex_dispatcher_backend = "deepep";

  // CUDA graphs, tensor-parallel weight sharding, routing noise.
  std::int64_t cuda_graph_warmup_steps = 3;
  std::int64_t gtp = 1;
  std::optional<double> moe_input_jitter_eps = {};

  // Context parallelism of GDN on dev.
  std::string linear_cp_mode = "chunkwise"; // chunkwise | headwise
  std::string cp_partition = "zigzag";      // zigzag | contiguous
  bool conv_pad_alignment = false;

  // PYTORCH_CUDA_ALLOC_CONF. Read by the simulation of the allocator.
  bool expandable_segments = false;

  // Run-time form of the batch.
  bool packed = false;                      // packed sequences (cu_seqlens)

  // Whether torch.compile is active on the helper functions (gates, gated norm, output gate). Read by
  // the op lists: without it their fp32 intermediates are kept.
  bool compiled = true;
};

} // namespace gdn::config
