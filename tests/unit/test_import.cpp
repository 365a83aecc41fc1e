#include <algorithm>

#include <doctest/doctest.h>

#include "config/import.h"
#include "config/json.h"
#include "config/model_io.h"
#include "config/profiles.h"
#include "config/run_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "tests/unit/refused.h"

using namespace gdn;
using namespace gdn::config;
using namespace gdn::test;

namespace {

// Tiny random checkpoints as transformers 5.17 writes them; keys without a size left out.
const char* const kNextMoe = R"({
 "attention_bias": false, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 256, "hidden_act": "silu",
 "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 5632,
 "layer_types": ["linear_attention", "full_attention"],
 "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
 "linear_value_head_dim": 128, "max_position_embeddings": 32768, "mlp_only_layers": [], "model_type": "qwen3_next",
 "moe_intermediate_size": 64, "norm_topk_prob": true, "num_attention_heads": 2, "num_experts": 8,
 "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.25,
 "rms_norm_eps": 1e-06,
 "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
 "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 64, "tie_word_embeddings": false,
 "transformers_version": "5.17.0", "use_cache": false, "vocab_size": 256
})";

const char* const kQwen35Dense = R"({
 "attention_bias": false, "head_dim": 256, "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 192,
 "layer_types": ["linear_attention", "full_attention"],
 "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
 "linear_value_head_dim": 128, "model_type": "qwen3_5_text", "num_attention_heads": 2, "num_hidden_layers": 2,
 "num_key_value_heads": 1, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
 "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
 "tie_word_embeddings": false, "vocab_size": 256
})";

Model imported(const std::string& json, std::vector<std::string>* notes = nullptr) {
  std::vector<std::string> local;
  return read_model(model_from_hugging_face(parse_json(json, "config.json"), "m", notes ? *notes : local));
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

Run run_of(const MegatronArguments& args) {
  Run run;
  for (const Setting& s : args.run) apply(run, s.key, s.value, s.where);
  return run;
}

} // namespace

TEST_CASE("a qwen3_next configuration") {
  std::vector<std::string> notes;
  Model m = imported(kNextMoe, &notes);
  CHECK(m.hidden == 128);
  CHECK(m.mixers == std::vector<LayerKind>{LayerKind::Gdn, LayerKind::Attention});
  CHECK(m.mlps == std::vector<MlpKind>{MlpKind::Moe, MlpKind::Moe});
  CHECK(m.gdn.key_heads == 1);
  CHECK(m.gdn.value_heads == 2);
  CHECK(m.gdn.value_head_dim == 128);
  CHECK(m.attention.heads == 2);
  CHECK(m.attention.kv_heads == 1);
  CHECK(m.attention.head_dim == 256);
  CHECK(m.attention.output_gate);
  CHECK(m.attention.qk_norm);
  CHECK(m.attention.rotary_fraction == 0.25);
  CHECK(m.attention.rope_theta == 10000);
  CHECK(m.moe.experts == 8);
  CHECK(m.moe.top_k == 2);
  CHECK(m.moe.ffn == 64);
  CHECK(m.moe.shared_ffn == 64);
  CHECK(m.moe.shared_gate);
  CHECK(m.moe.renormalise);
  CHECK(m.zero_centred_norm);
  CHECK(!m.tied_embeddings);
  CHECK(m.vocab == 256);
  REQUIRE(notes.size() == 1);
  CHECK(has(notes[0], "mtp_num_hidden_layers: 0"));
}

TEST_CASE("a qwen3_5 text configuration") {
  std::vector<std::string> notes;
  Model m = imported(replaced(kQwen35Dense, "\"vocab_size\"", "\"sliding_chunk\": 3, \"vocab_size\""), &notes);
  CHECK(m.ffn == 192);
  CHECK(m.moe.experts == 0);
  CHECK(m.mlps == std::vector<MlpKind>{MlpKind::Dense, MlpKind::Dense});
  CHECK(notes == std::vector<std::string>{"not read: sliding_chunk"});
}

TEST_CASE("a vision configuration nests the text model") {
  std::string text = replaced(kQwen35Dense, "\"vocab_size\": 256", "\"vocab_size\": 256, \"mtp_num_hidden_layers\": 1");
  Model m = imported(R"({"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": )" +
                     replaced(text, "\"tie_word_embeddings\": false, ", "") +
                     R"(, "vision_config": {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072,
                         "out_hidden_size": 128, "patch_size": 16}})");
  REQUIRE(m.vision.has_value());
  CHECK(m.vision->depth == 12);
  CHECK(m.vision->out == 128);
  CHECK(m.mtp_layers == 1);
  CHECK(m.tied_embeddings);
}

TEST_CASE("an olmo_hybrid configuration derives what it leaves out") {
  Model m = imported(R"({"model_type": "olmo_hybrid", "hidden_size": 3840, "num_hidden_layers": 32, "num_attention_heads": 30,
    "intermediate_size": 11008, "vocab_size": 100352, "rms_norm_eps": 1e-06, "rope_parameters": null})");
  CHECK(m.gdn.key_heads == 30);
  CHECK(m.gdn.key_head_dim == 96);
  CHECK(m.gdn.value_head_dim == 192);
  CHECK(m.gdn.negative_eigenvalues);
  CHECK(m.attention.kv_heads == 30);
  CHECK(m.attention.head_dim == 128);
  CHECK(m.attention.whole_vector_qk_norm);
  CHECK(!m.attention.output_gate);
  CHECK(!m.attention.rope);
  CHECK(m.mixers[3] == LayerKind::Attention);
  CHECK(m.mixers[31] == LayerKind::Attention);
}

TEST_CASE("configurations that are refused") {
  CHECK(has(message_of([] { imported(R"({"model_type": "qwen4_exp"})"); }), "config.json:1:16: model_type: unknown value the string 'qwen4_exp'"));
  CHECK(has(message_of([] { imported(R"({"hidden_size": 3})"); }), "missing key model_type"));
  CHECK(has(message_of([] { imported("[]"); }), "expected a map"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"num_experts\": 8,", "")); }), "missing key num_experts"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"num_experts\": 8", "\"num_experts\": \"8\"")); }), "got the string '8'"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"num_experts\": 8", "\"num_experts\": 8.5")); }),
            "config.json:7:96: num_experts: expected an integer from 0 to 65536, got '8.5'"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"full_attention\"", "\"sliding_attention\"")); }), "unknown value 'sliding_attention'"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")); }), "2 entries for 3 layers"));
  CHECK(has(message_of([] { imported(replaced(kNextMoe, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"")); }), "hidden_act"));
  CHECK(has(message_of([] { imported(replaced(replaced(kNextMoe, "\"linear_num_key_heads\": 1", "\"linear_num_key_heads\": 2"),
                                              "\"linear_num_value_heads\": 2", "\"linear_num_value_heads\": 3")); }),
            "3 value heads are not a multiple of 2 key heads"));
}

TEST_CASE("sparse steps and dense layers of a qwen3_next configuration") {
  Model m = imported(replaced(kNextMoe, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 2"));
  CHECK(m.mlps == std::vector<MlpKind>{MlpKind::Dense, MlpKind::Moe});
  CHECK(m.ffn == 5632);
  m = imported(replaced(kNextMoe, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [1]"));
  CHECK(m.mlps == std::vector<MlpKind>{MlpKind::Moe, MlpKind::Dense});
}

// A launch script in the form people keep them.
const char* const kScript = R"(#!/bin/bash
GPT_ARGS=(
    --num-layers 48            # Qwen3-Next
    --hidden-size 2048 --ffn-hidden-size 5120
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256
    --attention-output-gate --qk-layernorm --rotary-percent 0.25 --rotary-base 10000000
    --position-embedding-type rope --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --experimental-attention-variant gated_delta_net --linear-attention-freq '([1]*3+[0]*1)*12'
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-dtype fp32
    --moe-aux-loss-coeff 1e-3 --mtp-num-layers 1 --vocab-size 151936
)
TRAIN_ARGS=(
    --seq-length 4096 --micro-batch-size 1 --global-batch-size=256 --bf16
    --lr 1e-4 --data-path "$DATA" --split 99,1,0
    --hidden-dropout 0.0 --attention-dropout 0.0
    --recompute-granularity selective --recompute-modules moe_act shared_experts layernorm
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --use-distributed-optimizer
)
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \
    --expert-model-parallel-size 32 --moe-token-dispatcher-type flex --moe-grouped-gemm ${GPT_ARGS[@]}
)";

TEST_CASE("Megatron-LM arguments: a whole script") {
  MegatronArguments args = read_megatron_arguments(kScript, "train.sh");
  Run run = run_of(args);
  CHECK(run.parallel.gpus == 128);
  CHECK(run.parallel.pp == 4);
  CHECK(run.parallel.vp == 3);
  CHECK(run.parallel.ep == 32);
  CHECK(run.parallel.etp == 1);
  CHECK(run.global_batch == 256);
  CHECK(run.micro_batches() == 8); // DP 32
  CHECK(run.dtype == DType::BF16);
  CHECK(run.optimizer.distributed);
  CHECK(run.optimizer.gradient_dtype == DType::FP32);
  CHECK(run.cross_entropy == CrossEntropy::FusedTe);
  CHECK(run.recompute.modules == std::vector<std::string>{"moe_act", "shared_experts", "layernorm"});
  CHECK(run.moe_token_dispatcher == "flex");
  CHECK(run.moe_grouped_gemm);
  CHECK(!run.moe_permute_fusion); // Megatron-LM's default
  CHECK(run.hidden_dropout == 0);

  Model m = read_model(args.model);
  CHECK(m.layers() == 48);
  CHECK(std::count(m.mixers.begin(), m.mixers.end(), LayerKind::Attention) == 12);
  CHECK(m.mixers[3] == LayerKind::Attention);
  CHECK(m.attention.kv_heads == 2);
  CHECK(m.attention.head_dim == 256);
  CHECK(m.attention.output_gate);
  CHECK(m.gdn.value_heads == 32); // Megatron-LM's default
  CHECK(m.moe.experts == 512);
  CHECK(m.moe.shared_gate);
  CHECK(m.mtp_layers == 1);
  CHECK(!m.tied_embeddings);
  CHECK(m.norm_eps == 1e-6);

  CHECK(args.unread == std::vector<std::string>{"--lr 1e-4", "--data-path $DATA", "--split 99,1,0", "pretrain_gpt.py", "${GPT_ARGS[@]}"});
  CHECK(args.notes.empty());
}

TEST_CASE("Megatron-LM arguments: defaults that matter are Megatron-LM's") {
  MegatronArguments args = read_megatron_arguments("--tensor-model-parallel-size 2 --micro-batch-size 2 --seq-length 1024", "line");
  Run run = run_of(args);
  CHECK(run.dtype == DType::FP32);
  CHECK(run.parallel.etp == 2); // follows TP when absent
  CHECK(run.hidden_dropout == 0.1);
  CHECK(!run.optimizer.distributed);
  CHECK(!run.moe_grouped_gemm);
  CHECK(run.moe_token_dispatcher == "allgather");
  CHECK(args.model.kind == Node::Kind::Null);
  CHECK(args.notes.size() == 2); // GPUs and global batch
  run = run_of(read_megatron_arguments("--bf16 --grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --micro-batch-size 2 "
                                       "--nproc-per-node 8 --recompute-activations --fp8-format hybrid --transformer-impl local", "line"));
  CHECK(run.optimizer.gradient_dtype == DType::BF16);
  CHECK(run.optimizer.master_dtype == DType::BF16);
  CHECK(run.optimizer.moment1_dtype == DType::BF16);
  CHECK(run.global_batch == 16);
  CHECK(run.recompute.granularity == Granularity::Selective);
  CHECK(run.fp8_recipe == "delayed");
  CHECK(run.build == Build::Local);
}

TEST_CASE("Megatron-LM arguments that are refused") {
  auto refused = [](const std::string& text) { return message_of([&] { run_of(read_megatron_arguments(text, "line")); }); };
  CHECK(has(refused("--micro-batch-size"), "line:1:1: --micro-batch-size: needs a value"));
  CHECK(has(refused("--micro-batch-size x"), "micro_batch_size: expected an integer"));
  CHECK(has(refused("--bf16\n --seq-length $SEQ"), "line:2:2: --seq-length: '$SEQ' is a shell variable"));
  CHECK(has(refused("--num-layers-per-virtual-pipeline-stage 2"), "needs --num-layers"));
  CHECK(has(refused("--num-layers 12 --linear-attention-freq [1]*3+[0"), "is not an integer or a list"));
  CHECK(has(refused("--num-layers 12 --linear-attention-freq ([1]*3+[0])*2"), "8 entries for 12 layers"));
  CHECK(has(refused("--moe-token-dispatcher-type alltoal"), "did you mean 'alltoall'?"));
  auto model = [](const std::string& text) { return message_of([&] { read_model(read_megatron_arguments(text, "line").model); }); };
  CHECK(has(model("--num-layers 12 --hidden-size 64 --num-attention-heads 4"), "missing key vocab_size"));
}

TEST_CASE("arguments that only a model would read are returned when there is none") {
  MegatronArguments args = read_megatron_arguments("--hidden-size 64 --swiglu --foo -1 --bar=baz", "line");
  CHECK(args.unread == std::vector<std::string>{"--foo -1", "--bar baz", "--hidden-size 64", "--swiglu"});
}
