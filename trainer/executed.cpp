#include "trainer/executed.h"

#include <algorithm>
#include <map>
#include <sstream>

#include <fmt/format.h>

#include "config/model_io.h"
#include "config/run_io.h"
#include "config/yaml.h"
#include "core/error.h"

namespace gdn::trainer {

const std::vector<ExecutedSetting>& executed_settings() {
  using enum Treatment;
  constexpr std::string_view kRanks = "the program of the ranks says what it needs";
  constexpr std::string_view kOffload = "nothing is offloaded";
  constexpr std::string_view kInstalled = "read by the target stack's own checks";
  // clang-format off
  static const std::vector<ExecutedSetting> table{
      // The run.
      {"source", NoEffect, "", "", "text"},
      {"gpus", Executed, "", "", kRanks},
      {"tensor_model_parallel_size", Executed, "", "", kRanks},
      {"context_parallel_size", Executed, "", "", kRanks},
      {"pipeline_model_parallel_size", Executed, "", "", kRanks},
      {"virtual_pipeline_model_parallel_size", Executed, "", "", kRanks},
      {"pipeline_model_parallel_layout", Executed, "", "", kRanks},
      {"decoder_first_pipeline_num_layers", Executed, "", "", kRanks},
      {"decoder_last_pipeline_num_layers", Executed, "", "", kRanks},
      {"expert_model_parallel_size", Executed, "", "", kRanks},
      {"expert_tensor_parallel_size", Executed, "", "", kRanks},
      {"sequence_parallel", Executed, "", "", kRanks},
      {"cp_comm_type", Executed, "", "", kRanks},
      {"micro_batch_size", Executed},
      {"global_batch_size", Executed},
      {"seq_length", Executed},
      {"recompute_granularity", Executed},
      {"recompute_method", Executed},
      {"recompute_num_layers", Executed},
      {"recompute_modules", Executed},
      {"spans", Executed},
      {"distribute_saved_activations", Fixed, "", "", "kept inputs are not sharded"},
      {"params_dtype", Executed, "bf16 fp32", "bf16 fp32", "there are no fp16 functions, and no loss scaling"},
      {"fp8_recipe", Fixed, "", "", "there is no fp8 arithmetic"},
      {"fp4", Fixed, "", "", "there is no fp4 arithmetic"},
      {"use_distributed_optimizer", Executed, "", "", "on one rank both forms hold the same"},
      {"use_precision_aware_optimizer", Fixed, "", "", "AdamW here has fp32 masters and moments"},
      {"main_grads_dtype", Fixed, "", "", "gradients accumulate in fp32"},
      {"main_params_dtype", Fixed, "", "", "masters are fp32"},
      {"exp_avg_dtype", Fixed, "", "", "moments are fp32"},
      {"exp_avg_sq_dtype", Fixed, "", "", "moments are fp32"},
      {"deterministic_mode", Executed, "false", "false true", "the plain-PyTorch rule of Megatron's deterministic mode is not run; every kernel here repeats its results anyway"},
      {"cross_entropy_loss_fusion", Executed},
      {"cross_entropy_fusion_impl", Executed},
      {"loss_chunk_size", Executed},
      {"make_vocab_size_divisible_by", Executed},
      {"vision", Executed, "absent", "absent", "a vision tower is priced by its parameters alone"},
      {"train_mtp", Executed},
      {"attention_backend", Executed, "auto", "auto", "unfused core attention, which keeps the scores, is not run"},
      {"hidden_dropout", Fixed, "", "", "no op draws dropout masks"},
      {"attention_dropout", Fixed, "", "", "no op draws dropout masks"},
      {"experimental_attention_variant", Executed, "null gdn gated_delta_net gdn2", "null gdn gated_delta_net gdn2", "the model says which mixer its layers have"},
      {"moe_grouped_gemm", Fixed, "", "", "experts run as one grouped GEMM"},
      {"moe_permute_fusion", Executed},
      {"moe_token_dispatcher_type", Fixed, "", "", "rows move by all-to-all"},
      {"moe_router_force_load_balancing", Executed, "false", "", "the router of stack megatron chooses by its logits; native's can deal slots out in turn"},
      {"moe_shared_expert_overlap", Fixed, "", "", "ops run in program order on one stream"},
      {"overlap_moe_expert_parallel_comm", Fixed, "", "", "ops run in program order on one stream"},
      {"delay_wgrad_compute", Fixed, "", "", "ops run in program order on one stream"},
      {"tp_comm_overlap", Fixed, "", "", "ops run in program order on one stream"},
      {"overlap_grad_reduce", Fixed, "", "", "gradients are summed when the last backward is done"},
      {"overlap_param_gather", Fixed, "", "", "parameters are gathered as part of the update"},
      {"overlap_p2p_comm", Fixed, "", "", "ops run in program order on one stream"},
      {"moe_expert_capacity_factor", Executed, "null", "", "the padded routing of stack megatron is not run; native's is"},
      {"moe_imbalance", Executed, "", "", kRanks},
      {"cpu_offloading", Fixed, "", "", kOffload},
      {"cpu_offloading_num_layers", Fixed, "", "", kOffload},
      {"fine_grained_activation_offloading", Fixed, "", "", kOffload},
      {"offload_modules", Fixed, "", "", kOffload},
      {"cuda_graph_impl", Fixed, "", "", "no graph is captured"},
      {"cuda_graph_scope", Fixed, "", "", "no graph is captured"},
      {"document_lengths", Fixed, "", "", "the documents of a packed run come from its data"},
      {"max_documents", Executed, "", "", "room in the scratch of kernels"},
      {"optimizer_offload_fraction", Fixed, "", "", "the update runs on the device"},
      {"lora_rank", Fixed, "", "", "every weight is trained"},
      {"lora_targets", Fixed, "", "", "every weight is trained"},
      {"frozen_weight_bits", Fixed, "", "", "every weight is trained"},
      {"stack", Executed},
      {"build", Executed},
      {"revision", Executed},
      {"l2norm", Executed},
      // The run's settings block.
      {"te_version", NoEffect, "", "", kInstalled},
      {"fla_version", NoEffect, "", "", kInstalled},
      {"torch_version", NoEffect, "", "", kInstalled},
      {"multi_latent_attention", Fixed, "", "", "no layer has it"},
      {"enable_mhc_connections", Fixed, "", "", "there is one residual stream"},
      {"mhc_recompute_layer_num", Fixed, "", "", "there is one residual stream"},
      {"fp32_residual_connection", Fixed, "", "", "the residual stream has params_dtype"},
      {"fused_single_qkv_rope", Fixed, "", "", "q and k are rotated apart"},
      {"activation", Fixed, "", "", "the convolution ends in SiLU"},
      {"linear_attention_freq", Fixed, "", "", "the model says which mixer its layers have"},
      {"moe_layer_recompute", Executed, "", "", "another spelling of the module moe"},
      {"autograd_grad", Fixed, "", "", "backward steps write where the program says"},
      {"min_offloaded_tensor_size", Fixed, "", "", kOffload},
      {"activation_offload_fraction", Fixed, "", "", kOffload},
      {"delta_offload_bytes_across_pp_ranks", Fixed, "", "", kOffload},
      {"max_inflight_offloads", Fixed, "", "", kOffload},
      {"use_transformer_engine_op_fuser", Fixed, "", "", "ops are fused as their list says"},
      {"moe_paged_stash", Fixed, "", "", "activations of experts are not paged"},
      {"moe_expert_rank_capacity_factor", Fixed, "", "", "activations of experts are not paged"},
      {"moe_flex_dispatcher_backend", Fixed, "", "", "rows move by all-to-all"},
      {"cuda_graph_warmup_steps", Fixed, "", "", "no graph is captured"},
      {"gtp", Fixed, "", "", "weights are not sharded that way"},
      {"moe_input_jitter_eps", Fixed, "", "", "the router's input is not disturbed"},
      {"linear_cp_mode", Fixed, "", "", "the rule runs on whole sequences"},
      {"cp_partition", Fixed, "", "", "the rule runs on whole sequences"},
      {"conv_pad_alignment", Fixed, "", "", "the convolution takes any length"},
      {"packed", Executed, "", "", "micro-batches of whole documents (train.data)"},
      {"expandable_segments", NoEffect, "", "", "of PyTorch's allocator; memory here is one arena"},
      {"moe_probs_at_unpermute", Fixed, "", "", "probabilities act in the activation of the experts"},
      {"compiled", Fixed, "", "", "gates, gated norm and output gate run as their compiled form"},
      // The model.
      {"name", NoEffect, "", "", "text"},
      {"aliases", NoEffect, "", "", "text"},
      {"hidden_size", Executed},
      {"num_hidden_layers", Executed},
      {"vocab_size", Executed},
      {"tie_word_embeddings", Executed},
      {"rms_norm_eps", Executed},
      {"layernorm_zero_centered_gamma", Executed},
      {"full_attention_interval", Executed, "", "", "read into layer_types"},
      {"layer_types", Executed},
      {"linear_attention_type", Executed, "gdn gdn2", "gdn gdn2", "other mixers have no op list"},
      {"linear_num_key_heads", Executed},
      {"linear_num_value_heads", Executed},
      {"linear_key_head_dim", Executed},
      {"linear_value_head_dim", Executed},
      {"linear_conv_kernel_dim", Executed},
      {"linear_bias", Executed},
      {"linear_conv_bias", Executed},
      {"linear_use_qk_l2norm", Executed},
      {"linear_allow_neg_eigval", Executed},
      {"linear_norm_eps", Executed},
      {"A_init_range", Executed},
      {"conv_init", Executed},
      {"num_attention_heads", Executed},
      {"num_key_value_heads", Executed},
      {"head_dim", Executed},
      {"attn_output_gate", Executed},
      {"qk_layernorm", Executed},
      {"qk_layernorm_whole_vector", Executed},
      {"attention_bias", Executed},
      {"position_embedding_type", Executed},
      {"partial_rotary_factor", Executed},
      {"rope_theta", Executed},
      {"num_experts", Executed},
      {"num_experts_per_tok", Executed},
      {"moe_intermediate_size", Executed},
      {"shared_expert_intermediate_size", Executed},
      {"moe_shared_expert_gate", Executed},
      {"norm_topk_prob", Executed},
      {"router_aux_loss_coef", Executed},
      {"moe_z_loss_coeff", Executed},
      {"moe_router_dtype", Executed, "fp32 bf16", "fp32 bf16", "there is no fp64 router"},
      {"scoring_func", Executed, "softmax", "softmax", "sigmoid routing with its selection bias is not run"},
      {"mlp_only_layers", Executed},
      {"intermediate_size", Executed},
      {"mtp_num_hidden_layers", Executed},
      {"vision_config", NoEffect, "", "", "the run decides on the tower (vision)"},
      {"parameters", NoEffect, "", "", "published counts, to be reproduced"},
      {"parameters_only", Fixed, "", "", "such a model has no op lists"},
      {"unmodelled_sizes", NoEffect, "", "", "sizes of layers without an op list"},
  };
  // clang-format on
  return table;
}

namespace {

std::string text_of(const config::Node* n) {
  if (n == nullptr || n->kind == config::Node::Kind::Null) return "null";
  if (n->kind == config::Node::Kind::Scalar) return n->text;
  std::string text = "[";
  for (const config::Node& item : n->items) text += (text.size() > 1 ? ", " : "") + text_of(&item);
  return text + "]";
}

// What a model or run has for each key, as text.
std::map<std::string, std::string, std::less<>> values_of(const config::Model& model, const config::Run& run) {
  std::map<std::string, std::string, std::less<>> out;
  for (const config::Entry& e : config::to_node(model).entries) out[e.key] = text_of(&e.value);
  for (const config::RunKey& k : config::run_keys()) {
    const config::Node value = k.get(run);
    out[std::string(k.name)] = text_of(&value);
  }
  return out;
}

// Where `key` was given: an option, or its place in the file.
std::string position_of(std::string_view key, const SettingOrigin& origin) {
  if (origin.settings)
    for (auto s = origin.settings->rbegin(); s != origin.settings->rend(); ++s)
      if (s->key == key || config::canonical_model_key(s->key) == key) return s->where + ": ";
  if (!origin.file) return "";
  auto in = [&](const config::Node* map) {
    if (map == nullptr || map->kind != config::Node::Kind::Map) return std::string();
    for (const config::Entry& e : map->entries)
      if (e.key == key || config::canonical_model_key(e.key) == key) return e.where + ": ";
    return std::string();
  };
  const config::Node* run = origin.file->find("run");
  for (const config::Node* map : {run ? run->find("settings") : nullptr, run, origin.file})
    if (std::string at = in(map); !at.empty()) return at;
  return "";
}

// Empty: executed. Else what is.
std::string refusal(const ExecutedSetting& s, const std::string& value, const std::string& usual, bool native) {
  if (s.treatment == Treatment::NoEffect) return "";
  if (s.treatment == Treatment::Fixed) return value == usual ? "" : usual;
  const std::string_view values = native ? s.native : s.values;
  if (values.empty()) return "";
  std::istringstream words{std::string(values)};
  std::vector<std::string> allowed;
  for (std::string w; words >> w;) allowed.push_back(w);
  return std::find(allowed.begin(), allowed.end(), value) != allowed.end() ? "" : fmt::format("{}", fmt::join(allowed, ", "));
}

} // namespace

void require_executed(const config::Model& model, const config::Run& run, const SettingOrigin& origin) {
  const auto given = values_of(model, run), usual = values_of(config::Model(), config::Run());
  const bool native = run.stack == "native";
  for (const ExecutedSetting& s : executed_settings()) {
    const auto at = given.find(s.key);
    if (at == given.end()) continue; // a key of parts that this model has not
    const auto fallback = usual.find(s.key);
    const std::string what = refusal(s, at->second, fallback == usual.end() ? "null" : fallback->second, native);
    if (!what.empty())
      throw Error(ErrorCode::Config,
                  fmt::format("{}{} = {} is not executed (executed: {}): {}", position_of(s.key, origin), s.key, at->second, what, s.why),
                  "gdnplan prices it; gdntrain refuses what it would have to ignore");
  }
  if (model.moe.experts > 0 && model.moe.router_dtype == DType::BF16 && run.dtype != DType::BF16)
    throw Error(ErrorCode::Config, fmt::format("{}moe_router_dtype = bf16 is not executed with params_dtype = {} (executed: fp32)",
                                               position_of("moe_router_dtype", origin), name_of(run.dtype)),
                "gdnplan prices it; gdntrain refuses what it would have to ignore");
}

} // namespace gdn::trainer
