#include <doctest/doctest.h>

#include <limits>
#include <set>

#include <fmt/format.h>

#include "config/model_io.h"
#include "config/profiles.h"
#include "config/run_io.h"
#include "core/error.h"
#include "kernels/describe/own.h"
#include "trainer/cpu/device.h"
#include "trainer/data.h"
#include "trainer/executed.h"
#include "trainer/sweep.h"

// Every key of the configuration is executed (another value changes what a step computes or holds), has
// no effect, or is refused by name. Nothing is ignored.
using namespace gdn;
using namespace gdn::trainer;
using config::Setting;

namespace {

using Settings = std::vector<Setting>;

config::ModelProfile profile_with(const Settings& settings) {
  Settings all{{"num_hidden_layers", "2"}, {"full_attention_interval", "2"}, {"hidden_size", "32"}, {"seq_length", "16"},
               {"micro_batch_size", "1"}, {"global_batch_size", "2"}, {"params_dtype", "fp32"}};
  all.insert(all.end(), settings.begin(), settings.end());
  std::vector<Setting> model;
  for (const Setting& s : all)
    if (!config::canonical_model_key(s.key).empty() && s.key != "linear_attention_freq") model.push_back(s);
  config::ModelProfile p = config::Profiles().model("tiny", model);
  for (const Setting& s : all)
    if (config::canonical_model_key(s.key).empty() || s.key == "linear_attention_freq") config::apply(p.run, s.key, s.value, "--set");
  return p;
}

// All that a step is: its program, its bytes, its loss and gradients.
std::string step_of(const config::ModelProfile& p) {
  require_executed(p.model, p.run);
  CpuDevice device;
  // Room for documents is in the scratch of the kernels, which the CPU's functions do not need.
  Session session(p.model, p.run, device, std::numeric_limits<Bytes>::max(), p.run.settings.packed ? &kernels::own_provider() : nullptr);
  session.parameters().initialise(7);
  session.use(plan::Setting::of(p.run));
  double drawn = 0; // the weights of layer 0
  for (const ParameterSlot& slot : session.parameters().slots())
    if (slot.name().find("layers.0.gdn.") == 0)
      for (float w : session.parameters().weights(slot.name())) drawn += w * w;
  const auto tokens = open_tokens({.seed = 7}, ".", p.model.vocab, p.run);
  const StepResult r = session.run(step_batches(*tokens, p.run, 0), 0, 7);
  return fmt::format("{} {:a} {} {} {:a} {:a} {:a}\n{}", session.parameters().weights("final_norm").front(), drawn, r.peak.bytes, session.arena_bytes(), r.loss, r.aux_loss + r.mtp_loss,
                     session.parameters().gradient_norm(), signature(session.program()));
}

struct Change {
  const char* key;
  const char* value; // another than the one in use
  Settings with = {}; // what must be set for it to mean anything
  void (*edit)(config::Model&) = nullptr; // in place of a value that only a file can have
};

const Settings kSelective{{"recompute_granularity", "selective"}, {"recompute_modules", "[moe]"}};
const Settings kFull{{"recompute_granularity", "full"}, {"recompute_method", "uniform"}, {"recompute_num_layers", "1"}};
const Settings kLinearLoss{{"cross_entropy_loss_fusion", "true"}, {"cross_entropy_fusion_impl", "linear"}, {"loss_chunk_size", "8"}};

const std::vector<Change> kChanges{
    {"micro_batch_size", "2"}, {"global_batch_size", "4"}, {"seq_length", "24"},
    {"recompute_granularity", "selective", {{"recompute_modules", "[moe]"}}}, {"recompute_modules", "[gdn_norm_out]", kSelective},
    {"recompute_method", "block", kFull}, {"recompute_num_layers", "2", kFull}, {"spans", "[conv=conv1d..conv1d]"},
    {"params_dtype", "bf16"}, {"cross_entropy_loss_fusion", "true", {{"cross_entropy_fusion_impl", "te"}}}, {"cross_entropy_fusion_impl", "linear", {{"cross_entropy_loss_fusion", "true"}}},
    {"loss_chunk_size", "4", kLinearLoss}, {"make_vocab_size_divisible_by", "1024"}, {"train_mtp", "false", {{"mtp_num_hidden_layers", "1"}}},
    {"moe_permute_fusion", "false"}, {"moe_router_force_load_balancing", "true", {{"stack", "native"}}}, {"stack", "native"}, {"build", "local"}, {"revision", "main"},
    {"l2norm", "kernel", {{"revision", "main+gdn_qkv+l2norm_kernel"}}}, {"moe_layer_recompute", "true"}, {"packed", "true"},
    {"max_documents", "160", {{"packed", "true"}, {"seq_length", "160"}}},
    {"hidden_size", "64"}, {"num_hidden_layers", "4"}, {"vocab_size", "128"}, {"tie_word_embeddings", "true"}, {"rms_norm_eps", "1e-3"},
    {"layernorm_zero_centered_gamma", "false"}, {"full_attention_interval", "1"}, {"linear_attention_type", "gdn2"},
    {"linear_num_key_heads", "1"}, {"linear_num_value_heads", "2"}, {"linear_key_head_dim", "16"}, {"linear_value_head_dim", "16"},
    {"linear_conv_kernel_dim", "3"}, {"linear_bias", "true"}, {"linear_conv_bias", "true"}, {"linear_use_qk_l2norm", "false"},
    {"linear_allow_neg_eigval", "true"}, {"linear_norm_eps", "1e-2"}, {"A_init_range", "", {}, [](config::Model& m) { m.gdn.a_init_hi = 2; }}, {"conv_init", "0.01"},
    {"num_attention_heads", "2"}, {"num_key_value_heads", "1"}, {"head_dim", "16"}, {"attn_output_gate", "false"}, {"qk_layernorm", "false"},
    {"qk_layernorm_whole_vector", "true"}, {"attention_bias", "true"}, {"position_embedding_type", "none"}, {"partial_rotary_factor", "0.5"},
    {"rope_theta", "100"}, {"num_experts", "4"}, {"num_experts_per_tok", "1"}, {"moe_intermediate_size", "32"},
    {"shared_expert_intermediate_size", "32"}, {"moe_shared_expert_gate", "false"}, {"norm_topk_prob", "false"}, {"router_aux_loss_coef", "0.5"},
    {"moe_z_loss_coeff", "0.5"}, {"moe_router_dtype", "bf16", {{"params_dtype", "bf16"}}}, {"mlp_only_layers", "[0]", {{"intermediate_size", "32"}}},
    {"intermediate_size", "64", {{"mlp_only_layers", "[0]"}, {"intermediate_size", "32"}}}, {"mtp_num_hidden_layers", "1"},
};

// Another value of keys that are refused, or have no effect.
const std::vector<Change> kOthers{
    {"source", "ours: a test"}, {"distribute_saved_activations", "true"}, {"fp8_recipe", "tensorwise"}, {"fp4", "true"},
    {"use_precision_aware_optimizer", "true"}, {"main_grads_dtype", "bf16"}, {"main_params_dtype", "bf16"}, {"exp_avg_dtype", "bf16"},
    {"exp_avg_sq_dtype", "bf16"}, {"hidden_dropout", "0.1"}, {"attention_dropout", "0.1"}, {"moe_grouped_gemm", "false"},
    {"moe_token_dispatcher_type", "flex"}, {"moe_shared_expert_overlap", "true"}, {"delay_wgrad_compute", "true"}, {"tp_comm_overlap", "true"},
    {"overlap_grad_reduce", "true"}, {"overlap_param_gather", "true"}, {"overlap_p2p_comm", "false"}, {"overlap_moe_expert_parallel_comm", "true"},
    {"moe_imbalance", "1.5"}, {"cpu_offloading", "true"}, {"cpu_offloading_num_layers", "1"}, {"fine_grained_activation_offloading", "true"},
    {"offload_modules", "[moe_act]"}, {"cuda_graph_impl", "local"}, {"cuda_graph_scope", "[attn]"}, {"te_version", "2.9.0"}, {"fla_version", "0.4.0"},
    {"torch_version", "2.9.0"}, {"multi_latent_attention", "true"}, {"enable_mhc_connections", "true"}, {"mhc_recompute_layer_num", "1"},
    {"fp32_residual_connection", "true"}, {"fused_single_qkv_rope", "true"}, {"activation", "gelu"}, {"linear_attention_freq", "3"},
    {"autograd_grad", "true"}, {"min_offloaded_tensor_size", "1"}, {"activation_offload_fraction", "0.5"},
    {"delta_offload_bytes_across_pp_ranks", "1"}, {"max_inflight_offloads", "1"}, {"use_transformer_engine_op_fuser", "true"},
    {"moe_paged_stash", "true"}, {"moe_expert_rank_capacity_factor", "1.5"}, {"moe_flex_dispatcher_backend", "hybridep"},
    {"cuda_graph_warmup_steps", "1"}, {"gtp", "2"}, {"moe_input_jitter_eps", "0.1"}, {"linear_cp_mode", "headwise"}, {"cp_partition", "contiguous"},
    {"conv_pad_alignment", "true"}, {"compiled", "false"}, {"moe_probs_at_unpermute", "true"}, {"document_lengths", "[8x2]"}, {"optimizer_offload_fraction", "0.5"}, {"lora_rank", "4"},
    {"lora_targets", "[linear_qkv]"}, {"frozen_weight_bits", "8"}, {"expandable_segments", "true"}, {"name", "another"}, {"aliases", "[b]"},
    {"vision_config", "", {}, [](config::Model& m) { m.vision = config::VisionShape{1, 8, 1, 8, 8}; }},
    {"parameters", "", {}, [](config::Model& m) { m.published_text = m.published_total = 1; }},
    {"parameters_only", "", {}, [](config::Model& m) { m.parameters_only = true; }},
    {"unmodelled_sizes", "", {}, [](config::Model& m) { m.unmodelled_sizes["low_rank"] = 4; }},
};

// The program of the ranks says what it executes of these; one of one rank refuses all but 1.
const std::set<std::string, std::less<>> kRanks{
    "gpus", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "cp_comm_type", "use_distributed_optimizer", "moe_imbalance"};

const Change* find(const std::vector<Change>& changes, std::string_view key) {
  for (const Change& c : changes)
    if (key == c.key) return &c;
  return nullptr;
}

std::string message_of(const config::ModelProfile& p) {
  try {
    require_executed(p.model, p.run);
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Config);
    return e.what();
  }
  return "";
}

config::ModelProfile changed(const Change& c) {
  Settings all = c.with;
  if (!c.edit) all.push_back({c.key, c.value});
  config::ModelProfile p = profile_with(all);
  if (c.edit) c.edit(p.model);
  return p;
}

} // namespace

std::set<std::string, std::less<>> all_keys() {
  std::set<std::string, std::less<>> keys;
  for (const config::RunKey& k : config::run_keys()) keys.emplace(k.name);
  for (const config::ModelKey& k : config::model_keys()) keys.emplace(k.name);
  return keys;
}

TEST_CASE("executed: every key of the configuration has one row") {
  std::set<std::string, std::less<>> keys = all_keys(), rows;
  for (const ExecutedSetting& s : executed_settings()) {
    CAPTURE(s.key);
    CHECK(rows.emplace(s.key).second);
    WARN(keys.contains(s.key)); // a row may come before its key
  }
  for (const std::string& k : keys) CHECK_MESSAGE(rows.contains(k), k);
}

TEST_CASE("executed: what is not is refused by name, what has no effect has none, what is changes a step") {
  const std::string usual = step_of(profile_with({}));
  for (const ExecutedSetting& s : executed_settings()) {
    CAPTURE(s.key);
    if (!all_keys().contains(s.key)) continue;
    if (kRanks.contains(s.key) || s.key == "layer_types") continue; // layer_types: what full_attention_interval becomes
    if (s.treatment == Treatment::Executed && !s.values.empty() && !find(kChanges, s.key)) continue; // the next case
    const Change* c = find(s.treatment == Treatment::Executed ? kChanges : kOthers, s.key);
    REQUIRE(c != nullptr);
    const config::ModelProfile p = changed(*c);
    const std::string message = message_of(p);
    if (s.treatment == Treatment::Fixed) {
      CHECK(message.find(std::string(s.key) + " = ") != std::string::npos);
      continue;
    }
    CHECK(message == "");
    if (message.empty()) CHECK((step_of(p) == (c->with.empty() ? usual : step_of(profile_with(c->with)))) == (s.treatment == Treatment::NoEffect));
  }
}

TEST_CASE("executed: of some keys, some values are") {
  struct Case {
    const char *key, *value, *stack;
    bool executed;
  };
  for (const Case& c : {Case{"params_dtype", "fp16", "megatron", false}, {"params_dtype", "fp16", "native", false}, {"params_dtype", "bf16", "native", true},
                        {"deterministic_mode", "true", "megatron", false}, {"deterministic_mode", "true", "native", true},
                        {"vision", "trained", "megatron", false}, {"vision", "frozen", "native", false}, {"attention_backend", "unfused", "megatron", false},
                        {"attention_backend", "flash", "megatron", true}, {"experimental_attention_variant", "dsa", "megatron", false},
                        {"experimental_attention_variant", "gdn", "megatron", true}, {"moe_expert_capacity_factor", "1.5", "megatron", false},
                        {"moe_expert_capacity_factor", "1.5", "native", true}, {"moe_router_dtype", "fp64", "megatron", false},
                        {"moe_router_dtype", "bf16", "megatron", false}, // in a run in fp32
                        {"moe_router_force_load_balancing", "true", "megatron", false},
                        {"scoring_func", "sigmoid", "native", false}, {"linear_attention_type", "gdn2", "native", true}}) {
    CAPTURE(c.key);
    CAPTURE(c.value);
    CAPTURE(c.stack);
    const config::ModelProfile p = profile_with({{"stack", c.stack}, {c.key, c.value}});
    const std::string message = message_of(p);
    CHECK(message.empty() == c.executed);
    if (!c.executed) CHECK(message.find(std::string(c.key) + " = " + c.value) != std::string::npos);
    else CHECK_NOTHROW(step_of(p));
  }
}

TEST_CASE("executed: a refusal says where the setting stands") {
  const config::ModelProfile p = profile_with({{"fp4", "true"}, {"scoring_func", "sigmoid"}});
  const Settings flags{{"fp4", "true", "--set"}};
  CHECK_THROWS_WITH_AS(require_executed(p.model, p.run, {nullptr, &flags}), doctest::Contains("--set: fp4 = true is not executed (executed: false)"), Error);
}
