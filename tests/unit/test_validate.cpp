#include <algorithm>
#include <functional>
#include <set>

#include <doctest/doctest.h>

#include "core/error.h"
#include "known_models.h"
#include "model/modules.h"
#include "model/validate.h"

using namespace gdn;
using namespace gdn::model;
using config::Granularity;
using config::Model;
using config::Run;
using gdn::test::known_model;

namespace {

// A legal run of Qwen3.5-35B-A3B on one node.
Run legal_run() {
  Run run;
  run.parallel.gpus = run.parallel.ep = 8;
  run.global_batch = 256;
  return run;
}

void select(Run& run, std::vector<std::string> modules) {
  run.recompute.granularity = Granularity::Selective;
  run.recompute.modules = std::move(modules);
}

void recompute_fully(Run& run, const char* method, std::int64_t layers) {
  run.recompute.granularity = Granularity::Full;
  run.recompute.method = method;
  run.recompute.num_layers = layers;
}

void offload(Run& run, std::vector<std::string> modules) {
  run.fine_grained_offload = true;
  run.offload_modules = std::move(modules);
}

void capture(Run& run, const char* impl, std::vector<std::string> scope) {
  run.cuda_graph_impl = impl;
  run.cuda_graph_scope = std::move(scope);
}

void use_gdn2(Model& m) {
  std::replace(m.mixers.begin(), m.mixers.end(), config::LayerKind::Gdn, config::LayerKind::Gdn2);
}

void use_attention_only(Model& m) {
  m.mixers.assign(m.mixers.size(), config::LayerKind::Attention);
}

std::vector<std::string> rejected_rules(const Model& model, const Run& run) {
  std::vector<std::string> rules;
  for (const Violation& v : validate(model, run))
    if (v.verdict == Verdict::Rejected &&
        std::find(rules.begin(), rules.end(), v.rule) == rules.end())
      rules.push_back(v.rule);
  return rules;
}

std::string text_of(const std::vector<Violation>& violations) {
  std::string text;
  for (const Violation& v : violations) text += v.rule + " " + describe(v) + "\n";
  return text;
}

} // namespace

// ------------------------------------------------------------------------ every rule, once ----

namespace {

struct RuleCase {
  const char* rule;
  Exception exception;
  std::function<void(Model&, Run&)> breaks;
  Verdict verdict = Verdict::Rejected;
};

constexpr Exception A = Exception::AssertionError, V = Exception::ValueError,
                    N = Exception::NotImplementedError, I = Exception::ImportError,
                    R = Exception::RuntimeError, W = Exception::Warning, P = Exception::Plan;
constexpr Verdict kWarned = Verdict::Warned, kTolerated = Verdict::Tolerated;

// clang-format off
const std::vector<RuleCase>& rule_cases() {
  static const std::vector<RuleCase> cases{
      // Recompute.
      {"recompute.1", V, [](Model&, Run& r) { r.cpu_offloading = true; r.cpu_offloading_num_layers = 40; }},
      {"recompute.1", V, [](Model&, Run& r) { r.cpu_offloading = true; r.cpu_offloading_num_layers = -1; }},
      {"recompute.1", V, [](Model&, Run& r) { r.cpu_offloading = true; r.parallel.pp = 2; r.parallel.ep = 4; }},
      {"recompute.1", V, [](Model&, Run& r) { r.cpu_offloading = true; select(r, {"moe"}); }},
      {"recompute.2", V, [](Model&, Run& r) { r.recompute.granularity = static_cast<Granularity>(7); }},
      {"recompute.3", V, [](Model&, Run& r) { recompute_fully(r, "uniformly", 1); }},
      {"recompute.4", V, [](Model&, Run& r) { recompute_fully(r, "", 1); }},
      {"recompute.5", V, [](Model&, Run& r) { recompute_fully(r, "uniform", 1); r.recompute.num_layers.reset(); }},
      {"recompute.5", V, [](Model&, Run& r) { select(r, {}); r.recompute.num_layers = 1; }},
      {"recompute.6", V, [](Model&, Run& r) {
         r.distribute_saved_activations = true;
         r.parallel.tp = 2;
         r.parallel.sequence_parallel = true;
         recompute_fully(r, "uniform", 1);
       }},
      {"recompute.8", A, [](Model&, Run& r) { select(r, {"moe_atc"}); }},
      {"recompute.8", A, [](Model&, Run& r) { select(r, {"moe:drop"}); }},
      {"recompute.8", A, [](Model&, Run& r) { select(r, {"gdn"}); }}, // dev has it, main+gdn_qkv has not
      {"recompute.8", A, [](Model&, Run& r) { r.revision = Revision::parse("main"); select(r, {"gdn_qkv"}); }},
      {"recompute.8", A, [](Model&, Run& r) { r.revision = Revision::parse("core_r0.18"); select(r, {"gdn_norm_out"}); }},
      {"recompute.8", A, [](Model&, Run& r) { r.revision = Revision::parse("core_r0.19"); select(r, {"mhc"}); }},
      {"recompute.9", V, [](Model&, Run& r) { select(r, {"moe_act"}); r.moe_grouped_gemm = false; }},
      {"recompute.10", V, [](Model&, Run& r) { select(r, {"mla_up_proj"}); }, kTolerated},
      {"recompute.11", V, [](Model& m, Run& r) { use_attention_only(m); select(r, {"gdn_norm_out"}); }},
      {"recompute.12", V, [](Model& m, Run& r) { use_attention_only(m); select(r, {"gdn_qkv"}); }},
      {"recompute.12", V, [](Model& m, Run& r) { use_gdn2(m); select(r, {"gdn_qkv"}); }},
      {"recompute.12", V, [](Model& m, Run& r) { use_gdn2(m); r.revision = Revision::parse("main+gdn"); select(r, {"gdn"}); }},
      {"recompute.12", V, [](Model& m, Run& r) {
         use_gdn2(m);
         r.revision = Revision::parse("main+gdn_in_proj_conv");
         select(r, {"gdn_in_proj_conv"});
       }},
      {"recompute.13", V, [](Model&, Run& r) { r.revision = Revision::parse("dev"); select(r, {"gdn", "gdn_norm_out"}); }},
      {"recompute.14", V, [](Model&, Run& r) { r.revision = Revision::parse("dev+gdn_qkv"); select(r, {"gdn_qkv", "gdn"}); }},
      {"recompute.15", W, [](Model&, Run& r) { select(r, {"core_attn"}); }, kWarned},
      {"recompute.15", W, [](Model&, Run& r) { r.recompute.granularity = Granularity::Selective; }, kWarned}, // row 7
      {"recompute.16", V, [](Model&, Run& r) { select(r, {"shared_experts"}); r.overlap.shared_experts = true; }},
      {"recompute.17", V, [](Model&, Run& r) { select(r, {"moe_act"}); r.fp8_recipe = "delayed"; }},
      {"recompute.17", V, [](Model&, Run& r) { select(r, {"layernorm"}); r.fp8_recipe = "delayed"; }},
      {"recompute.17", V, [](Model&, Run& r) { select(r, {"layernorm"}); r.fp8_recipe = "mxfp8"; r.settings.te_version = "2.5.0"; }},
      {"recompute.18", W, [](Model&, Run& r) { r.settings.moe_layer_recompute = true; }, kWarned},
      {"recompute.18", V, [](Model&, Run& r) { r.settings.moe_layer_recompute = true; recompute_fully(r, "uniform", 1); }},
      {"recompute.19", V, [](Model&, Run& r) { select(r, {"mhc"}); }, kTolerated},
      {"recompute.19", V, [](Model&, Run& r) { select(r, {"mhc", "mlp"}); }},
      {"recompute.19", V, [](Model&, Run& r) { select(r, {"mhc"}); r.settings.mhc_recompute_layer_num = "0"; }},
      {"recompute.19", V, [](Model&, Run& r) { select(r, {"mhc"}); r.settings.mhc_recompute_layer_num = "true"; }},
      {"recompute.19", N, [](Model&, Run& r) { select(r, {"mhc"}); offload(r, {"core_attn"}); }},
      {"recompute.20", W, [](Model&, Run& r) { r.settings.enable_mhc_connections = true; }, kWarned},
      {"recompute.20", V, [](Model&, Run& r) { r.settings.enable_mhc_connections = true; }}, // the model has MTP
      {"recompute.20", N, [](Model&, Run& r) { r.settings.enable_mhc_connections = true; recompute_fully(r, "uniform", 1); }},
      {"recompute.20", N, [](Model&, Run& r) { r.settings.enable_mhc_connections = true; r.parallel.pp = 2; r.parallel.ep = 4; }},
      {"recompute.20", N, [](Model&, Run& r) { r.settings.enable_mhc_connections = r.settings.fp32_residual_connection = true; }},
      {"recompute.21", A, [](Model&, Run& r) { select(r, {"moe"}); r.recompute.method = "uniform"; }},
      {"recompute.22", A, [](Model&, Run& r) { r.distribute_saved_activations = true; }},
      {"recompute.22", A, [](Model&, Run& r) { r.distribute_saved_activations = true; recompute_fully(r, "uniform", 1); }}, // tp 1
      {"recompute.23", A, [](Model&, Run& r) { recompute_fully(r, "uniform", 1); capture(r, "transformer_engine", {"attn"}); }},
      {"recompute.24", A, [](Model&, Run& r) { select(r, {"moe"}); capture(r, "transformer_engine", {"attn", "moe_router"}); }},
      {"recompute.25", A, [](Model&, Run& r) { select(r, {"core_attn"}); capture(r, "local", {"attn"}); r.attention_dropout = 0.1; }},
      {"recompute.25", A, [](Model&, Run& r) { select(r, {"moe"}); capture(r, "local", {}); r.hidden_dropout = 0.1; }},
      {"recompute.25", A, [](Model&, Run& r) { select(r, {"mlp"}); capture(r, "local", {"mlp"}); r.hidden_dropout = 0.1; }},
      {"recompute.25", A, [](Model&, Run& r) { select(r, {"moe"}); capture(r, "local", {"moe"}); r.settings.moe_input_jitter_eps = 1e-2; }},
      {"recompute.26", A, [](Model&, Run& r) {
         select(r, {"shared_experts"});
         capture(r, "local", {"moe_router"});
         r.settings.gtp = 2;
         r.fp4 = true;
       }},
      {"recompute.27", V, [](Model&, Run& r) { r.cpu_offloading = true; capture(r, "local", {"attn"}); }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.settings.torch_version = "2.5.1"; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.parallel.pp = 2; r.parallel.ep = 4; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.parallel.ep = 1; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.moe_token_dispatcher = "allgather"; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; recompute_fully(r, "uniform", 1); }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.recompute.method = "block"; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.recompute.num_layers = 1; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; select(r, {"moe"}); }},
      // ... even when the granularity is not selective.
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.recompute.modules = {"moe"}; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = true; r.dtype = DType::FP32; }},
      {"recompute.28", A, [](Model&, Run& r) { r.overlap_moe_expert_parallel_comm = r.overlap.shared_experts = true; }},
      {"recompute.28", A, [](Model& m, Run& r) { r.overlap_moe_expert_parallel_comm = true; m.mtp_layers = 2; }},
      {"recompute.29", A, [](Model&, Run& r) { recompute_fully(r, "uniform", 2); }},
      {"recompute.29", W, [](Model&, Run& r) { recompute_fully(r, "block", 2); }, kWarned},
      {"recompute.30", R, [](Model&, Run& r) { select(r, {"moe"}); r.settings.autograd_grad = true; }},
      {"recompute.30", R, [](Model&, Run& r) { recompute_fully(r, "uniform", 1); r.settings.autograd_grad = true; }},

      // Offload.
      {"offload.1", A, [](Model&, Run& r) { offload(r, {"core_attn"}); r.cpu_offloading = true; }},
      {"offload.1", A, [](Model&, Run& r) { offload(r, {}); }},
      {"offload.1", A, [](Model&, Run& r) { offload(r, {"core_atn"}); }},
      {"offload.2", V, [](Model&, Run& r) { offload(r, {"attn_proj"}); }},
      {"offload.2", V, [](Model&, Run& r) { offload(r, {"gdp_qkv"}); select(r, {"gdp_in_proj"}); }},
      {"offload.3", A, [](Model&, Run& r) { offload(r, {"moe_act"}); select(r, {"moe"}); }},
      {"offload.3", A, [](Model&, Run& r) { offload(r, {"expert_fc1"}); select(r, {"moe"}); }},
      {"offload.4", A, [](Model&, Run& r) { offload(r, {"core_attn"}); r.settings.min_offloaded_tensor_size = -1; }},
      {"offload.4", A, [](Model&, Run& r) { offload(r, {"core_attn"}); r.settings.activation_offload_fraction = 1.5; }},
      {"offload.4", A, [](Model&, Run& r) { offload(r, {"core_attn"}); r.settings.delta_offload_bytes_across_pp_ranks = -1; }},
      {"offload.5", V, [](Model&, Run& r) { offload(r, {"fused_group_mlp"}); }},
      {"offload.5", V, [](Model&, Run& r) { offload(r, {"fused_group_mlp", "moe_act"}); r.settings.use_transformer_engine_op_fuser = true; }},
      {"offload.6", A, [](Model&, Run& r) { offload(r, {"qkv_linear"}); capture(r, "local", {"attn"}); }},
      {"offload.6", A, [](Model&, Run& r) { offload(r, {"moe_act"}); capture(r, "local", {}); }},
      {"offload.6", A, [](Model&, Run& r) { offload(r, {"moe_act"}); capture(r, "local", {"moe"}); }},
      {"offload.6", A, [](Model&, Run& r) { offload(r, {"moe_act"}); capture(r, "local", {"attn"}); r.settings.cuda_graph_warmup_steps = 0; }},
      {"offload.6", A, [](Model&, Run& r) { offload(r, {"moe_act"}); capture(r, "full_iteration", {}); }},
      {"offload.7", A, [](Model&, Run& r) {
         offload(r, {"expert_fc1"});
         r.overlap_moe_expert_parallel_comm = true;
         r.settings.moe_flex_dispatcher_backend = "ncclep";
       }},
      {"offload.8", V, [](Model&, Run& r) { r.settings.moe_paged_stash = r.cpu_offloading = true; r.settings.moe_expert_rank_capacity_factor = 2; }},
      {"offload.8", V, [](Model&, Run& r) { r.settings.moe_paged_stash = true; }},
      {"offload.8", V, [](Model&, Run& r) { r.settings.moe_paged_stash = true; r.settings.moe_expert_rank_capacity_factor = 2; offload(r, {"moe_act"}); }},

      // GDN dimensions and runtime.
      {"gdn.1", W, [](Model&, Run& r) { r.attention_variant = "gated_delta_net"; }, kWarned},
      {"gdn.variant", V, [](Model&, Run& r) { r.attention_variant = "gnd"; }},
      {"gdn.variant", V, [](Model&, Run& r) { r.attention_variant = "gdn"; r.revision = Revision::parse("core_r0.19"); }},
      {"gdn.variant", V, [](Model& m, Run& r) { use_gdn2(m); r.revision = Revision::parse("dev"); }},
      {"gdn.2", V, [](Model&, Run& r) { r.parallel.tp = 3; r.parallel.gpus = 24; }},
      {"gdn.2", V, [](Model& m, Run& r) { m.attention.kv_heads = 6; r.parallel.tp = 4; }},
      {"gdn.3", A, [](Model& m, Run& r) { use_attention_only(m); r.attention_variant = "gdn"; }},
      {"gdn.3", V, [](Model& m, Run& r) { use_attention_only(m); r.attention_variant = "gdn2"; }},
      {"gdn.4", A, [](Model& m, Run&) { m.gdn.conv_kernel = 0; }},
      {"gdn.4", A, [](Model& m, Run&) { m.gdn.key_heads = 0; }},
      {"gdn.4", A, [](Model& m, Run&) { m.gdn.value_heads = 24; }},
      {"gdn.4", A, [](Model& m, Run& r) { m.gdn.value_heads = 48; m.gdn.key_heads = 24; r.parallel.cp = 16; r.parallel.gpus = 16; }},
      {"gdn.4", A, [](Model&, Run& r) { r.revision.base = "dev"; r.settings.linear_cp_mode = "headwise"; r.parallel.cp = 32; r.parallel.gpus = 32; }},
      {"gdn.6", A, [](Model&, Run& r) { r.settings.linear_attention_freq = "[1, 1, 1, 0]"; }},
      {"gdn.6", V, [](Model&, Run& r) { r.settings.linear_attention_freq = "every fourth"; }},
      {"gdn.7", A, [](Model&, Run& r) { r.build = config::Build::Local; }, kTolerated},
      {"gdn.8", N, [](Model&, Run& r) { r.settings.multi_latent_attention = true; }},
      {"gdn.8", V, [](Model&, Run& r) { r.settings.fused_single_qkv_rope = true; }},
      {"gdn.9", I, [](Model&, Run& r) { r.settings.fla_version = ""; }},
      {"gdn.9", A, [](Model& m, Run& r) { use_gdn2(m); r.settings.fla_version = "0.5.0"; }},
      {"gdn.10", A, [](Model& m, Run&) { m.gdn.a_init_lo = 17; }},
      {"gdn.10", A, [](Model& m, Run&) { m.gdn.a_init_lo = -1; }},
      {"gdn.11", A, [](Model& m, Run& r) { m = known_model("olmo-hybrid-7b"); r.parallel.ep = 1; r.fp8_recipe = "tensorwise"; }},
      {"gdn.11", W, [](Model&, Run& r) { r.fp8_recipe = "blockwise"; }, kWarned},
      {"gdn.12", A, [](Model& m, Run& r) { m.gdn.key_heads = 2; m.gdn.value_heads = 2; r.parallel.cp = 4; }},
      {"gdn.13", A, [](Model&, Run& r) { r.settings.activation = "gelu"; }},
      {"gdn.13", A, [](Model& m, Run&) { m.gdn.key_head_dim = 320; }},
      {"gdn.14", A, [](Model&, Run& r) { r.settings.packed = true; r.micro_batch = 2; }},
      {"gdn.14", A, [](Model&, Run& r) { r.settings.packed = r.deterministic = true; }},
      {"gdn.15", V, [](Model&, Run& r) { r.revision.base = "dev"; r.settings.cp_partition = "contiguous"; r.settings.linear_cp_mode = "headwise"; }},
      {"gdn.15", A, [](Model&, Run& r) { r.revision.base = "dev"; r.settings.conv_pad_alignment = true; }},
      {"gdn.15", V, [](Model&, Run& r) { r.revision.base = "dev"; r.parallel.cp = 2; r.micro_batch = 2; }},

      // Overlap, of any stack but where a library's is meant.
      {"overlap.shared", V, [](Model&, Run& r) { r.overlap.shared_experts = true; r.moe_token_dispatcher = "allgather"; }},
      {"overlap.local", P, [](Model&, Run& r) { r.overlap.tensor = r.parallel.sequence_parallel = true; r.build = config::Build::Local; r.parallel.tp = 2; }},
      {"overlap.tensor", A, [](Model&, Run& r) { r.overlap.tensor = true; }},
      {"overlap.tensor", A, [](Model&, Run& r) { r.stack = "native"; r.overlap.tensor = true; }},
      {"overlap.parameters", A, [](Model&, Run& r) { r.stack = "native"; r.overlap.parameters = true; }},
      {"overlap.parameters", A, [](Model&, Run& r) { r.overlap.parameters = r.overlap.gradients = true; r.optimizer.distributed = false; }},
      {"overlap.wgrad", A, [](Model&, Run& r) { r.stack = "native"; r.overlap.delayed_wgrad = true; }},
      {"recompute.28", A, [](Model&, Run& r) { r.stack = "native"; r.overlap_moe_expert_parallel_comm = r.overlap.shared_experts = true; }},

      // How work divides.
      {"parallel.positive", A, [](Model&, Run& r) { r.parallel.tp = 0; }},
      {"parallel.world", R, [](Model&, Run& r) { r.parallel.pp = 5; }},
      {"parallel.expert_world", R, [](Model&, Run& r) { r.parallel.etp = 2; }},
      {"parallel.batch", A, [](Model&, Run& r) { r.global_batch = 36; }},
      {"parallel.seq_cp", A, [](Model&, Run& r) { r.parallel.cp = 2; r.seq = 4098; }},
      {"parallel.seq_sp", A, [](Model&, Run& r) { r.parallel.tp = 4; r.parallel.sequence_parallel = true; r.seq = 4098; }},
      {"parallel.pp", A, [](Model&, Run& r) { r.parallel.pp = 16; r.parallel.gpus = 128; }},
      {"parallel.vp", A, [](Model&, Run& r) { r.parallel.pp = 2; r.parallel.ep = 4; r.parallel.vp = 3; }},
      {"parallel.vp", A, [](Model&, Run& r) { r.parallel.vp = 2; }},
      // 12 micro-batches in groups of 8, and 4 of them (megatron-core, schedules.py).
      {"parallel.interleaved", R, [](Model&, Run& r) { r.parallel = {.pp = 8, .vp = 5, .gpus = 8}; r.global_batch = 12; }},
      {"parallel.interleaved", V, [](Model&, Run& r) { r.parallel = {.pp = 8, .vp = 5, .gpus = 8}; r.global_batch = 4; }},
      {"parallel.interleaved", V, [](Model&, Run& r) { r.stack = "native"; r.parallel = {.pp = 8, .vp = 5, .gpus = 8}; r.global_batch = 4; }},
      {"parallel.cp_heads", A, [](Model&, Run& r) { r.parallel.cp = 4; r.cp_comm_type = "a2a"; }}, // 2 key-value heads
      {"parallel.layout", A, [](Model&, Run& r) { r.parallel.pp = 2; r.parallel.ep = 4; r.parallel.layout = {17, 22}; }},
      {"parallel.experts", A, [](Model&, Run& r) { r.parallel.ep = 24; r.parallel.gpus = 24; r.global_batch = 240; }},
      {"parallel.experts", V, [](Model& m, Run&) { m = known_model("qwen3.5-9b"); }},
      {"parallel.moe_sp", V, [](Model&, Run& r) { r.parallel.tp = 2; }},
      {"parallel.width", A, [](Model& m, Run& r) { m.moe.shared_ffn = 510; r.parallel.tp = 4; r.parallel.sequence_parallel = true; }},
      {"parallel.width", A, [](Model& m, Run& r) { m.vocab = 151937; r.vocab_divisor = 0; r.parallel.tp = 2; }},
      {"optimizer.1", A, [](Model&, Run& r) { r.optimizer.precision_aware = true; r.optimizer.distributed = false; }},
      {"optimizer.2", A, [](Model&, Run& r) { r.optimizer.moment1_dtype = DType::BF16; }},
      {"graphs.impl", A, [](Model&, Run& r) { r.cuda_graph_impl = "locale"; }},
      {"graphs.scope", A, [](Model&, Run& r) { capture(r, "local", {"attention"}); }},

      // Ours.
      {"plan.l2norm", P, [](Model&, Run& r) { r.l2norm = config::L2Norm::Kernel; }},
      {"plan.l2norm", P, [](Model& m, Run& r) { use_gdn2(m); r.revision = Revision::parse("main+l2norm_kernel"); r.l2norm = config::L2Norm::Kernel; }},
      {"plan.hypothetical", P, [](Model&, Run& r) { select(r, {"gdn_qkv:discard"}); }, kTolerated},
      {"plan.hypothetical", P, [](Model&, Run& r) { r.recompute.user_spans = {{"mine", "conv1d", "gates", false}}; }, kTolerated}};
  return cases;
}
// clang-format on

} // namespace

TEST_CASE("a legal run breaks nothing") {
  CHECK_MESSAGE(validate(known_model("qwen3.5-35b-a3b"), legal_run()).empty(),
                text_of(validate(known_model("qwen3.5-35b-a3b"), legal_run())));
}

TEST_CASE("every rule fires with the stack's exception class") {
  for (const RuleCase& c : rule_cases()) {
    Model model = known_model("qwen3.5-35b-a3b");
    Run run = legal_run();
    c.breaks(model, run);
    const std::vector<Violation> found = validate(model, run);
    CAPTURE(c.rule);
    CHECK_MESSAGE(std::any_of(found.begin(), found.end(),
                              [&](const Violation& v) {
                                return v.rule == c.rule && v.exception == c.exception &&
                                       v.verdict == c.verdict;
                              }),
                  text_of(found));
    CHECK((c.verdict != Verdict::Rejected || any_rejected(found)));
  }
}

TEST_CASE("every row of the stack's three lists is exercised") {
  std::set<std::string> tested;
  for (const RuleCase& c : rule_cases()) tested.insert(c.rule);
  for (int row = 1; row <= 30; ++row)
    if (row != 7)
      CHECK_MESSAGE(tested.contains("recompute." + std::to_string(row)), row); // 7: a default
  for (int row = 1; row <= 8; ++row)
    CHECK_MESSAGE(tested.contains("offload." + std::to_string(row)), row);
  for (int row = 1; row <= 15; ++row)
    if (row != 5)
      CHECK_MESSAGE(tested.contains("gdn." + std::to_string(row)), row); // 5: modifies row 4
}

// NVIDIA/Megatron-LM's configuration validator, NVIDIA-NeMo/RL#2280.
TEST_CASE("the validation table: one message a line") {
  struct Row {
    std::function<void(Model&, Run&)> input;
    const char* rule; // "" for valid
    std::vector<const char*> mentions;
  };
  // clang-format off
  const Row rows[] = {
      {[](Model&, Run& r) { select(r, {"moe_atc"}); }, "recompute.8", {"moe_atc", "moe_act", "gdn_norm_out"}},
      {[](Model&, Run& r) { select(r, {}); r.recompute.num_layers = 1; }, "recompute.5", {"recompute_num_layers", "full"}},
      {[](Model&, Run& r) { recompute_fully(r, "", 1); }, "recompute.4", {"uniform", "block"}},
      {[](Model&, Run& r) { recompute_fully(r, "uniform", 1); r.recompute.num_layers.reset(); }, "recompute.5", {"recompute_num_layers"}},
      {[](Model& m, Run& r) { use_attention_only(m); select(r, {"gdn_norm_out"}); }, "recompute.11", {"no GDN layer present"}},
      {[](Model&, Run& r) { select(r, {"moe_act"}); r.moe_grouped_gemm = false; }, "recompute.9", {"moe_grouped_gemm"}},
      {[](Model&, Run& r) { select(r, {"shared_experts"}); r.overlap.shared_experts = true; }, "recompute.16", {"cannot be combined"}},
      {[](Model&, Run& r) { select(r, {"moe"}); r.overlap_moe_expert_parallel_comm = true; }, "recompute.28", {"moe", "cannot be combined"}},
      {[](Model&, Run& r) { select(r, {"moe_act"}); r.fp8_recipe = "delayed"; }, "recompute.17", {"delayed"}},
      {[](Model&, Run& r) { select(r, {"layernorm"}); r.fp8_recipe = "delayed"; }, "recompute.17", {"delayed"}},
      {[](Model&, Run& r) { recompute_fully(r, "uniform", 1); capture(r, "transformer_engine", {"attn"}); }, "recompute.23", {"full-iteration"}},
      {[](Model&, Run& r) { r.cpu_offloading = true; r.parallel.pp = 2; r.parallel.ep = 4; }, "recompute.1", {"pp = 2"}},
      {[](Model&, Run& r) { r.cpu_offloading = true; select(r, {}); }, "recompute.1", {"recompute"}},
      {[](Model&, Run& r) { select(r, {}); }, "", {}},
      {[](Model&, Run& r) { r.recompute.granularity = Granularity::Selective; }, "", {}}};
  // clang-format on
  for (const Row& row : rows) {
    Model model = known_model("qwen3-next-80b-a3b");
    Run run = legal_run();
    row.input(model, run);
    const std::vector<std::string> rules = rejected_rules(model, run);
    const std::string text = text_of(validate(model, run));
    CAPTURE(text);
    if (*row.rule == '\0') {
      CHECK(rules.empty());
      continue;
    }
    CHECK(rules == std::vector<std::string>{row.rule});
    for (const char* word : row.mentions) CHECK(text.find(word) != std::string::npos);
  }
}

TEST_CASE("selective granularity without a list means core_attn; moe_layer_recompute adds moe") {
  Run run = legal_run();
  CHECK(active_modules(run).empty());
  run.recompute.granularity = Granularity::Selective;
  CHECK(active_modules(run) == std::vector<std::string>{"core_attn"});
  run.recompute.modules = std::vector<std::string>{};
  CHECK(active_modules(run).empty());
  run.settings.moe_layer_recompute = true;
  CHECK(active_modules(run) == std::vector<std::string>{"moe"});
  run.recompute.granularity = Granularity::Full;
  CHECK(active_modules(run).empty());
}

// modelscope/ms-swift#5851, NVIDIA/Megatron-LM#5443, #5296.
TEST_CASE("nested and useless lists are legal; gdn with gdn_norm_out names the pair") {
  const Model model = known_model("qwen3-next-80b-a3b");
  Run run = legal_run();
  for (std::vector<std::string> modules :
       {std::vector<std::string>{"core_attn", "moe", "moe_act", "mlp"},
        {"layernorm", "moe", "moe_act"},
        {"core_attn", "gdn_norm_out", "moe_act"},
        {"gdn_qkv", "gdn_norm_out", "moe"}}) {
    select(run, modules);
    CHECK(rejected_rules(model, run).empty());
  }
  run.revision = Revision::parse("dev");
  select(run, {"gdn", "gdn_norm_out"});
  CHECK(rejected_rules(model, run) == std::vector<std::string>{"recompute.13"});
  const std::string text = text_of(validate(model, run));
  CHECK(text.find("ValueError") != std::string::npos);
  CHECK(text.find("gdn and gdn_norm_out") != std::string::npos);
}

// alibaba/ROLL#497, ISEEKYAN/Megatron-LM#91.
TEST_CASE("tensor parallelism of GDN is limited by its key heads") {
  const Model next = known_model("qwen3-next-80b-a3b");
  Run run = legal_run();
  run.parallel.sequence_parallel = true;
  for (auto [tp, legal] :
       {std::pair{1, true}, {2, true}, {4, true}, {8, true}, {16, true}, {32, false}}) {
    run.parallel.tp = run.parallel.gpus = tp;
    run.parallel.ep = 1;
    const std::vector<Violation> found = validate(next, run);
    CAPTURE(tp);
    CHECK(any_rejected(found) == !legal);
    if (!legal) CHECK(text_of(found).find("hk = 16") != std::string::npos);
  }
  const Model dense = known_model("qwen3.5-27b");
  run.parallel.tp = run.parallel.gpus = 8;
  CHECK(!any_rejected(validate(dense, run))); // 4 kv heads on 8 ranks
}

TEST_CASE("parallel sizes that each model allows") {
  struct Row {
    const char* model;
    std::vector<std::int64_t> tp, pp;
  };
  const std::vector<std::int64_t> to16{1, 2, 4, 8, 16};
  for (const Row& row : {Row{"qwen3-next-80b-a3b", to16, {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}},
                         Row{"qwen3.8-2.4t-a95b", to16, {1, 2, 4, 23, 46, 92}},
                         Row{"qwen3.5-397b-a17b", to16, {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60}},
                         Row{"qwen3.5-122b-a10b", to16, {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}},
                         Row{"qwen3.5-35b-a3b", to16, {1, 2, 4, 5, 8, 10, 20, 40}},
                         Row{"qwen3.5-27b", {1, 2, 4, 8}, {1, 2, 4, 8, 16, 32, 64}},
                         Row{"qwen3.5-9b", to16, {1, 2, 4, 8, 16, 32}},
                         Row{"qwen3.5-4b", to16, {1, 2, 4, 8, 16, 32}},
                         Row{"qwen3.5-2b", {1, 2, 4, 8}, {1, 2, 3, 4, 6, 8, 12, 24}},
                         Row{"qwen3.5-0.8b", {1, 2, 4, 8}, {1, 2, 3, 4, 6, 8, 12, 24}}}) {
    CAPTURE(row.model);
    const Model model = known_model(row.model);
    std::vector<std::int64_t> tp, pp;
    for (std::int64_t n = 1; n <= 128; ++n) {
      Run run;
      run.parallel.sequence_parallel = true;
      run.parallel.gpus = n;
      run.seq = 4096 * n; // divides by every size tried
      run.parallel.tp = n;
      if (!any_rejected(validate(model, run))) tp.push_back(n);
      run.parallel.tp = 1;
      run.parallel.pp = n;
      if (!any_rejected(validate(model, run))) pp.push_back(n);
    }
    CHECK(tp == row.tp);
    CHECK(pp == row.pp);
    // TP x CP divides 16, whichever way it is split.
    for (std::int64_t cp : {1, 2, 4, 8, 16, 32}) {
      Run run;
      run.parallel.gpus = 2 * cp;
      run.parallel.tp = 2;
      run.parallel.cp = cp;
      run.parallel.sequence_parallel = true;
      CHECK(any_rejected(validate(model, run)) == (2 * cp > 16));
    }
  }
  // On dev, context parallelism of GDN does not split heads unless asked to.
  Run run;
  run.revision = Revision::parse("dev");
  run.parallel.cp = run.parallel.gpus = 32;
  CHECK(!any_rejected(validate(known_model("qwen3.5-35b-a3b"), run)));
}

TEST_CASE("the stack's own error comes first") {
  Model model = known_model("qwen3.5-35b-a3b");
  Run run = legal_run();
  run.parallel.sequence_parallel = true;
  run.parallel.tp = run.parallel.gpus = 32;
  run.global_batch = 32;
  select(run, {"moe_atc", "moe"});
  run.recompute.num_layers = 2;
  offload(run, {"attn_proj", "moe_act"});
  capture(run, "transformer_engine", {"moe_router"});
  run.overlap_moe_expert_parallel_comm = true;
  run.optimizer.moment1_dtype = DType::BF16;
  CHECK(rejected_rules(model, run) ==
        std::vector<std::string>{"gdn.2", "gdn.4", "recompute.5", "recompute.8", "offload.2",
                                 "offload.3", "recompute.24", "recompute.28", "optimizer.2"});
  run.recompute.method = "uniform"; // refused while arguments are parsed
  CHECK(rejected_rules(model, run).front() == "recompute.21");
}

TEST_CASE(
    "stack native is not bound by Megatron-LM's software, but by its own modules and shapes") {
  const Model model = known_model("qwen3.5-35b-a3b");
  Run run = legal_run();
  run.stack = "native";
  select(run, {"gdn", "moe_fc1", "-expert_act"});
  run.settings.fla_version = "";
  run.l2norm = config::L2Norm::Kernel;
  CHECK(validate(model, run).empty());
  select(run, {"gdn", "gdn_norm_out"}); // nested spans are legal
  CHECK(validate(model, run).empty());
  run.recompute.modules.reset(); // no default list
  CHECK(validate(model, run).empty());
  for (const char* module : {"gdm", "core_attn", "expert_act", "-gdn", "gdn:discard"}) {
    select(run, {module});
    CHECK(rejected_rules(model, run) == std::vector<std::string>{"native.module"});
  }
  run.recompute.modules.reset();
  run.lora.rank = 16;
  CHECK(rejected_rules(model, run) == std::vector<std::string>{"native.lora"});
}

// -------------------------------------------------------------------------- packed input ----

// Megatron-LM's GDN forward, verl-project/verl#6559, ISEEKYAN/Megatron-LM#111.
TEST_CASE("packed input: offsets are checked sequence by sequence") {
  CHECK(validate_packed({.offsets = {0, 29, 77, 128}, .total = 128}).empty());

  std::vector<Violation> found = validate_packed({.offsets = {0, 29, 77, 120}, .total = 128});
  REQUIRE(found.size() == 1);
  CHECK(found[0].exception == Exception::ValueError);
  CHECK(describe(found[0]).find("120") != std::string::npos);
  CHECK(describe(found[0]).find("128") != std::string::npos);

  found = validate_packed({.offsets = {0, 64, 64, 128}, .total = 128});
  REQUIRE(found.size() == 1);
  CHECK(describe(found[0]).find("offsets strictly increase") != std::string::npos);

  found = validate_packed({.offsets = {0, 29, 77, 128}, .total = 128, .cp = 2});
  REQUIRE(found.size() == 2); // 29 and 51; 48 divides by 2 x cp
  CHECK(found[0].exception == Exception::ValueError);
  CHECK(describe(found[0]).find("length 29 does not divide by cp = 2") != std::string::npos);

  found = validate_packed({.offsets = {0, 30, 128}, .total = 128, .cp = 2});
  REQUIRE(found.size() == 2); // 30 and 98 divide by 2, not by 4
  CHECK(describe(found[0]).find("zig-zag") != std::string::npos);
  CHECK(validate_packed({.offsets = {0, 30, 128}, .total = 128, .cp = 2, .zigzag = false}).empty());

  found = validate_packed({.offsets = {0, 29, 128},
                           .kv_offsets = {0, 30, 128},
                           .total = 128,
                           .batch = 2,
                           .deterministic = true});
  REQUIRE(found.size() == 3);
  for (const Violation& v : found) CHECK(v.exception == Exception::AssertionError);
  CHECK(any_rejected(validate_packed({.offsets = {}, .total = 128})));
  CHECK(any_rejected(validate_packed({.offsets = {1, 128}, .total = 128})));
}

// ----------------------------------------------------------------------- published recipes ----

namespace {

struct Recipe {
  const char* name;
  const char* model;
  std::int64_t gpus, tp, pp, cp, ep, micro_batch, global_batch, seq; // global_batch 0: not stated
  std::vector<std::string> rejected = {};                            // rules it breaks
  std::function<void(Run&)> with = [](Run&) {};
};

const std::vector<std::string> kGraphScope{"attn", "moe_router", "moe_preprocess"};

void full_uniform(Run& r) { recompute_fully(r, "uniform", 1); }
void overlap(Run& r) { r.overlap_moe_expert_parallel_comm = true; }
void hybrid_ep(Run& r) {
  r.moe_token_dispatcher = "flex";
  r.settings.moe_flex_dispatcher_backend = "hybridep";
}

// Megatron-Bridge 067f987: performance recipes of Qwen3.5-VL, library recipes; other frameworks.
// clang-format off
const std::vector<Recipe>& recipes() {
  static const std::vector<Recipe> list{
      // Performance recipes.
      {"35B perf H100", "qwen3.5-35b-a3b", 16, 1, 2, 1, 8, 1, 512, 4096, {}, [](Run& r) { r.parallel.layout = {17, 23}; hybrid_ep(r); capture(r, "transformer_engine", kGraphScope); }},
      {"35B perf H100 fp8", "qwen3.5-35b-a3b", 16, 1, 2, 1, 8, 1, 512, 4096, {"parallel.vp"}, [](Run& r) { r.parallel.vp = 12; r.fp8_recipe = "tensorwise"; overlap(r); }},
      {"35B perf B200", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 512, 4096},
      {"35B perf B200 fp8", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 512, 4096, {}, [](Run& r) { r.fp8_recipe = "tensorwise"; }},
      {"35B perf B200 mxfp8", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 512, 4096, {}, [](Run& r) { r.fp8_recipe = "mxfp8"; }},
      {"35B perf B300", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 8, 512, 4096, {}, hybrid_ep},
      {"35B perf GB200 bf16", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 2, 480, 4096, {}, hybrid_ep},
      {"35B perf GB200 fp8", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 3, 480, 4096, {}, [](Run& r) { r.fp8_recipe = "tensorwise"; hybrid_ep(r); }},
      {"122B perf H100", "qwen3.5-122b-a10b", 128, 2, 8, 1, 16, 1, 1024, 4096, {}, [](Run& r) { r.parallel.vp = 2; overlap(r); }},
      {"122B perf H100 fp8", "qwen3.5-122b-a10b", 128, 2, 8, 1, 16, 1, 1024, 4096, {}, [](Run& r) { r.parallel.vp = 2; r.fp8_recipe = "tensorwise"; overlap(r); }},
      {"122B perf B200", "qwen3.5-122b-a10b", 32, 1, 4, 1, 8, 1, 1024, 4096, {}, [](Run& r) { r.parallel.vp = 4; overlap(r); }},
      {"122B perf B200 mxfp8", "qwen3.5-122b-a10b", 32, 1, 4, 1, 8, 1, 1024, 4096, {}, [](Run& r) { r.parallel.vp = 4; r.fp8_recipe = "mxfp8"; overlap(r); }},
      {"122B perf B300", "qwen3.5-122b-a10b", 32, 1, 1, 1, 32, 2, 1024, 4096, {}, hybrid_ep},
      {"122B perf GB200", "qwen3.5-122b-a10b", 32, 1, 4, 1, 8, 1, 1024, 4096, {}, hybrid_ep},
      {"397B perf H100", "qwen3.5-397b-a17b", 256, 2, 8, 1, 32, 1, 1024, 4096, {"parallel.pp"}, [](Run& r) { r.parallel.vp = 4; overlap(r); }},
      {"397B perf B200", "qwen3.5-397b-a17b", 64, 1, 8, 1, 8, 1, 1024, 4096, {"parallel.pp"}, [](Run& r) { r.parallel.vp = 4; overlap(r); }},
      {"397B perf B300", "qwen3.5-397b-a17b", 64, 1, 1, 1, 64, 1, 1024, 4096, {}, hybrid_ep},
      {"397B perf GB200", "qwen3.5-397b-a17b", 64, 1, 8, 1, 8, 1, 1024, 4096, {"parallel.pp"}, hybrid_ep},
      // Library recipes.
      {"Next pretrain", "qwen3-next-80b-a3b", 32, 1, 4, 1, 8, 2, 32, 4096, {}, [](Run& r) { select(r, {"layernorm", "moe", "moe_act"}); r.moe_token_dispatcher = "flex"; }},
      {"Next SFT", "qwen3-next-80b-a3b", 16, 1, 2, 1, 8, 1, 64, 2048, {}, [](Run& r) { select(r, {"layernorm", "moe", "moe_act"}); }},
      {"0.8B SFT", "qwen3.5-0.8b", 1, 1, 1, 1, 1, 4, 32, 4096},
      {"2B SFT", "qwen3.5-2b", 1, 1, 1, 1, 1, 4, 32, 4096},
      {"4B SFT", "qwen3.5-4b", 2, 2, 1, 1, 1, 4, 32, 4096},
      {"9B SFT", "qwen3.5-9b", 4, 4, 1, 1, 1, 4, 32, 4096},
      {"27B SFT, no SP", "qwen3.5-27b", 16, 4, 4, 1, 1, 4, 32, 4096, {}, [](Run& r) { r.parallel.sequence_parallel = false; }},
      {"35B SFT", "qwen3.5-35b-a3b", 16, 1, 2, 1, 8, 1, 32, 4096, {}, [](Run& r) { r.parallel.layout = {17, 23}; full_uniform(r); hybrid_ep(r); }},
      {"35B SFT long context", "qwen3.5-35b-a3b", 32, 1, 4, 2, 8, 2, 512, 8192, {}, full_uniform},
      {"35B SFT FSDP", "qwen3.5-35b-a3b", 2, 1, 1, 1, 2, 4, 32, 4096, {}, full_uniform},
      {"122B SFT", "qwen3.5-122b-a10b", 48, 2, 6, 1, 8, 4, 36, 4096, {"parallel.batch"}, full_uniform},
      {"397B SFT", "qwen3.5-397b-a17b", 128, 2, 4, 1, 32, 4, 32, 4096, {"parallel.batch"}, full_uniform},
      {"9B LoRA", "qwen3.5-9b", 1, 1, 1, 1, 1, 4, 32, 4096},
      {"27B LoRA, no SP", "qwen3.5-27b", 2, 2, 1, 1, 1, 4, 32, 4096, {}, [](Run& r) { r.parallel.sequence_parallel = false; }},
      {"35B LoRA", "qwen3.5-35b-a3b", 4, 2, 1, 1, 4, 1, 32, 4096, {}, full_uniform},
      {"35B LoRA tuned", "qwen3.5-35b-a3b", 16, 1, 2, 1, 8, 1, 32, 4096, {}, [](Run& r) { r.parallel.layout = {17, 23}; capture(r, "transformer_engine", kGraphScope); }},
      {"122B LoRA", "qwen3.5-122b-a10b", 8, 2, 1, 1, 8, 4, 36, 4096, {"parallel.batch"}},
      {"397B LoRA", "qwen3.5-397b-a17b", 32, 2, 1, 1, 32, 4, 32, 4096, {"parallel.batch"}},
      {"35B pretrain functional", "qwen3.5-35b-a3b", 16, 1, 2, 1, 8, 1, 512, 4096, {}, [](Run& r) {
         r.parallel.layout = {16, 24};
         select(r, {"core_attn", "gdn_norm_out", "moe_act"});
         r.optimizer = {true, DType::BF16, true, DType::FP32, DType::BF16, DType::BF16};
       }},
      {"9B pretrain mock", "qwen3.5-9b", 4, 4, 1, 1, 1, 2, 32, 4096},
      {"27B pretrain mock", "qwen3.5-27b", 16, 4, 4, 1, 1, 2, 32, 4096},
      {"35B pretrain mock", "qwen3.5-35b-a3b", 8, 4, 2, 1, 4, 2, 32, 4096},
      {"122B pretrain mock", "qwen3.5-122b-a10b", 128, 4, 8, 2, 8, 2, 32, 4096},
      {"397B pretrain mock", "qwen3.5-397b-a17b", 512, 4, 16, 2, 16, 2, 32, 4096, {"parallel.pp"}},
      {"27B pretrain mock GB200, no SP", "qwen3.5-27b", 16, 2, 1, 1, 1, 2, 32, 4096, {}, [](Run& r) { r.parallel.sequence_parallel = false; }},
      {"35B SFT functional GB200", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 32, 4096, {}, hybrid_ep},
      {"9B text pretrain GB200", "qwen3.5-9b", 8, 1, 1, 1, 1, 2, 128, 4096, {}, [](Run& r) { capture(r, "transformer_engine", {"attn", "mlp"}); }},
      {"35B text pretrain GB200", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 512, 4096, {}, [](Run& r) { capture(r, "transformer_engine", kGraphScope); }},
      // Anchors.
      {"Next anchor", "qwen3-next-80b-a3b", 64, 1, 2, 1, 32, 2, 1024, 4096, {}, [](Run& r) { r.parallel.vp = 4; hybrid_ep(r); capture(r, "transformer_engine", kGraphScope); }},
      {"397B anchor", "qwen3.5-397b-a17b", 128, 1, 4, 1, 32, 1, 4096, 4096, {"parallel.vp"}, [](Run& r) { r.parallel.vp = 4; hybrid_ep(r); capture(r, "transformer_engine", kGraphScope); }},
      {"35B FSDP anchor", "qwen3.5-35b-a3b", 32, 1, 1, 1, 8, 16, 4096, 4096},
      // Other frameworks.
      {"Model Zoo Next", "qwen3-next-80b-a3b", 128, 1, 4, 1, 32, 1, 256, 4096, {}, [](Run& r) { r.parallel.vp = 3; r.vocab_divisor = 1187; select(r, {"moe_act", "shared_experts", "layernorm"}); }},
      {"Primus 35B MI355X", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 2, 256, 8192, {}, [](Run& r) { r.train_mtp = false; recompute_fully(r, "block", 0); }},
      {"Primus 35B MI300X", "qwen3.5-35b-a3b", 8, 1, 1, 1, 8, 1, 128, 8192, {}, [](Run& r) { r.train_mtp = false; recompute_fully(r, "block", 0); }},
      {"ms-swift 35B SFT", "qwen3.5-35b-a3b", 8, 4, 1, 1, 8, 1, 4, 32768, {}, [](Run& r) { r.settings.packed = true; r.moe_capacity_factor = 2; r.optimizer.precision_aware = true; full_uniform(r); }},
      {"ms-swift 35B LoRA", "qwen3.5-35b-a3b", 4, 1, 1, 1, 4, 4, 16, 2048, {}, full_uniform},
      {"ms-swift 4B fp8", "qwen3.5-4b", 2, 2, 1, 1, 1, 1, 2, 4096, {}, [](Run& r) { r.settings.packed = true; r.fp8_recipe = "blockwise"; full_uniform(r); }},
      {"ms-swift 4B LoRA", "qwen3.5-4b", 4, 1, 1, 1, 1, 4, 0, 2048},
      {"ms-swift Next LoRA", "qwen3-next-80b-a3b", 8, 2, 1, 1, 4, 1, 4, 4096, {}, [](Run& r) { r.settings.packed = true; full_uniform(r); }},
      {"ms-swift Next LoRA + MTP", "qwen3-next-80b-a3b", 8, 1, 1, 1, 4, 2, 16, 2048, {}, full_uniform},
      {"slime Next RL", "qwen3-next-80b-a3b", 32, 2, 4, 4, 8, 1, 0, 8192, {}, [](Run& r) { r.parallel.layout = {13, 13, 13, 9}; full_uniform(r); }},
      {"slime 27B RL", "qwen3.5-27b", 32, 4, 2, 4, 1, 1, 0, 8192, {}, [](Run& r) { r.parallel.layout = {34, 30}; full_uniform(r); }},
      {"slime 35B SFT", "qwen3.5-35b-a3b", 8, 2, 1, 1, 8, 1, 0, 8192, {}, full_uniform},
      {"verl 35B GRPO", "qwen3.5-35b-a3b", 8, 2, 1, 1, 8, 1, 0, 4096, {}, full_uniform},
      {"verl 35B GRPO, CP", "qwen3.5-35b-a3b", 8, 1, 1, 8, 8, 1, 0, 4096, {}, [](Run& r) { r.cp_comm_type = "all_gather"; full_uniform(r); }},
      {"verl 122B GRPO", "qwen3.5-122b-a10b", 32, 2, 2, 1, 8, 1, 0, 8192, {}, full_uniform},
      {"verl 397B SFT", "qwen3.5-397b-a17b", 128, 2, 4, 1, 32, 2, 0, 2048, {}, full_uniform},
      {"verl 397B GRPO GPU", "qwen3.5-397b-a17b", 128, 2, 2, 1, 64, 1, 0, 4096, {}, full_uniform},
      {"verl 397B GRPO NPU", "qwen3.5-397b-a17b", 256, 2, 4, 1, 64, 1, 0, 4096, {}, full_uniform},
      {"Olmo-Hybrid pretrain", "olmo-hybrid-7b", 512, 1, 1, 1, 1, 1, 512, 8192},
      {"Olmo-Hybrid long context", "olmo-hybrid-7b", 8, 1, 1, 2, 1, 1, 0, 65536}};
  return list;
}
// clang-format on

} // namespace

TEST_CASE("published recipes: legal ones pass, broken ones are refused for their reason") {
  for (const Recipe& recipe : recipes()) {
    Run run;
    run.parallel.gpus = recipe.gpus;
    run.parallel.tp = recipe.tp;
    run.parallel.pp = recipe.pp;
    run.parallel.cp = recipe.cp;
    run.parallel.ep = recipe.ep;
    run.parallel.sequence_parallel =
        recipe.tp > 1; // as the frameworks set it unless a recipe says no
    run.micro_batch = recipe.micro_batch;
    run.global_batch =
        recipe.global_batch > 0 ? recipe.global_batch : recipe.micro_batch * run.parallel.dp();
    run.seq = recipe.seq;
    run.vocab_divisor = 0; // Megatron-Bridge and the Hugging Face loaders do not pad
    recipe.with(run);
    const Model model = known_model(recipe.model);
    CAPTURE(recipe.name);
    CHECK_MESSAGE(rejected_rules(model, run) == recipe.rejected, text_of(validate(model, run)));
  }
}

TEST_CASE("the run of every built-in profile is legal") {
  const config::Profiles profiles;
  for (const config::Profiles::Listed& listed : profiles.models()) {
    CAPTURE(listed.name);
    const config::ModelProfile profile = profiles.model(listed.name);
    const std::vector<Violation> found = validate(profile.model, profile.run);
    CHECK_MESSAGE(!any_rejected(found), text_of(found));
  }
}

// --------------------------------------------------------------------------------- modules ----

TEST_CASE("modules by revision") {
  using Names = std::vector<std::string>;
  const Names base{"core_attn", "moe_act", "layernorm",     "mla_up_proj",
                   "mlp",       "moe",     "shared_experts"};
  auto with = [&](Names more) {
    Names all = base;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  CHECK(offered_modules(Revision::parse("core_r0.17")) == base);
  CHECK(offered_modules(Revision::parse("core_r0.18")) == base);
  CHECK(offered_modules(Revision::parse("core_r0.19")) == with({"gdn_norm_out"}));
  CHECK(offered_modules(Revision::parse("main")) ==
        with({"gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"}));
  CHECK(offered_modules(Revision::parse("dev")) == with({"gdn_norm_out", "gdn", "mhc"}));
  CHECK(offered_modules(Revision::parse("core_r0.19+gdn_qkv+gdn_in_proj_conv")) ==
        with({"gdn_norm_out", "gdn_qkv", "gdn_in_proj_conv"}));
  CHECK(offers(Revision::parse("main+gdn"), "gdn"));
  CHECK(where_offered(*find_module("gdn")) == "dev, or any base with +gdn");

  Names discard, inert;
  for (const Module& m : all_modules()) {
    if (m.kind == SpanKind::DiscardOutput) discard.emplace_back(m.name);
    if (m.inert) inert.emplace_back(m.name);
  }
  CHECK(discard == Names{"moe_act", "layernorm", "mla_up_proj", "gdn_norm_out", "gdp_in_proj",
                         "gdp_qkv", "mhc"});
  CHECK(inert == Names{"mla_up_proj", "gdp_in_proj", "gdp_qkv", "mhc"});
}

TEST_CASE("a module name may carry its discard form") {
  CHECK(parse_module("gdn_qkv") == ModuleName{"gdn_qkv", false});
  CHECK(kind_of(parse_module("gdn_qkv")) == SpanKind::WholeBlock);
  CHECK(kind_of(parse_module("gdn_qkv:discard")) == SpanKind::DiscardOutput);
  CHECK(is_hypothetical(parse_module("gdn_qkv:discard")));
  CHECK(!is_hypothetical(parse_module("gdn_norm_out:discard"))); // that is its kind
  CHECK(!is_hypothetical(parse_module("moe")));
  CHECK_THROWS_WITH_AS(parse_module("gdn_qvk"), doctest::Contains("did you mean 'gdn_qkv'"), Error);
  CHECK_THROWS_WITH_AS(parse_module("moe:drop"), doctest::Contains("unknown kind 'drop'"), Error);
  CHECK(find_conflict("gdn_norm_out", "gdn")->rule == "recompute.13");
  CHECK(find_conflict("gdn_norm_out", "gdn_qkv") == nullptr);
}
