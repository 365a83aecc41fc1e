#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "config/profiles.h"
#include "core/error.h"
#include "model/dims.h"
#include "model/library_buffers.h"
#include "plan/estimate.h"

using namespace gdn;

// Modes of a run beyond the plain step: each against a count by hand or a published rule.
namespace {

struct ModeCase {
  config::ModelProfile profile;
  config::Hardware hardware;

  ModeCase(const char* model, std::vector<config::Setting> settings)
      : profile(config::Profiles().model(model, settings)), hardware(config::Profiles().hardware(profile.hardware)) {}
  model::Dims dims() const { return model::Dims::of(profile.model, profile.run); }
  plan::Estimate estimate() const {
    plan::Estimator e(profile.model, profile.run, hardware);
    return e.evaluate(plan::Setting::of(profile.run));
  }
};

// llama3-70b, 12 layers on one GPU.
std::vector<config::Setting> one_gpu(std::vector<config::Setting> more = {}) {
  std::vector<config::Setting> s{{"num_hidden_layers", "12"}, {"gpus", "1"}, {"tensor_model_parallel_size", "1"},
                                 {"pipeline_model_parallel_size", "1"}, {"virtual_pipeline_model_parallel_size", "1"},
                                 {"sequence_parallel", "false"}, {"global_batch_size", "1"}};
  s.insert(s.end(), more.begin(), more.end());
  return s;
}

} // namespace

TEST_CASE("routing: balanced, a factor, a quantile of a histogram, the worst case") {
  const std::vector<config::Setting> ep{{"gpus", "8"}, {"expert_model_parallel_size", "8"}};
  auto rows = [&](const std::string& imbalance) {
    std::vector<config::Setting> s = ep;
    s.push_back({"moe_imbalance", imbalance});
    return ModeCase("qwen3.5-35b-a3b", s).dims().routed_rows;
  };
  CHECK(rows("1") == 4096 * 8);
  CHECK(rows("1.5") == 4096 * 12);
  // 32 of 256 experts a rank, so all 8 choices of all 8 x 4,096 tokens may fall on one.
  CHECK(rows("worst") == 8 * 4096 * 8);
  const std::filesystem::path file = std::filesystem::temp_directory_path() / "gdn_loads.txt";
  std::ofstream(file) << "# factor count\n1.0 50\n1.25 45\n2.0 4\n3.0 1\n";
  CHECK(rows("p95:" + file.string()) == 4096 * 10);
  CHECK(rows("p99:" + file.string()) == 4096 * 16);
  CHECK(rows("p100:" + file.string()) == 4096 * 24);
  std::filesystem::remove(file);
  CHECK_THROWS_AS(rows("p99:no-such-file"), Error);
  CHECK_THROWS_AS(rows("0.5"), Error);
}

TEST_CASE("routing: with moe recomputed, imbalance costs one layer's rows, not all layers'") {
  auto peak = [](const char* imbalance, const char* modules) {
    return ModeCase("qwen3.5-35b-a3b", {{"moe_imbalance", imbalance}, {"recompute_granularity", "selective"}, {"recompute_modules", modules},
                                    {"micro_batch_size", "4"}, {"cross_entropy_fusion_impl", "linear"}, {"loss_chunk_size", "1024"}})
        .estimate().peak_bytes;
  };
  const Bytes kept = peak("2", "[]") - peak("1", "[]"), recomputed = peak("2", "[moe]") - peak("1", "[moe]");
  CHECK(recomputed > 0);
  CHECK(kept > 15 * recomputed); // 40 layers against one replay with its gradients, about two
}

TEST_CASE("capacity padding: rows are exact at capacity x local experts x ranks") {
  // 4,096 tokens x 8 / 256 experts x 1.25 = 160 rows an expert and rank; 32 local experts, 8 ranks.
  CHECK(ModeCase("qwen3.5-35b-a3b", {{"moe_expert_capacity_factor", "1.25"}}).dims().routed_rows == 160 * 32 * 8);
}

TEST_CASE("packed documents: chunks start anew, attention reads its own document only") {
  const ModeCase whole("qwen3.5-35b-a3b", {{"seq_length", "4096"}});
  const ModeCase packed("qwen3.5-35b-a3b", {{"seq_length", "4096"}, {"document_lengths", "[2000, 100x20, 96]"}});
  CHECK(whole.dims().chunks == 64);
  CHECK(packed.dims().chunks == 32 + 20 * 2 + 2); // ceil(2000/64), ceil(100/64), ceil(96/64)
  CHECK(packed.dims().attention_keys == (2000 * 2000 + 20 * 100 * 100 + 96 * 96 + 4095) / 4096);
  CHECK_THROWS_AS(ModeCase("qwen3.5-35b-a3b", {{"seq_length", "4096"}, {"document_lengths", "[4000]"}}).dims(), Error);
  CHECK_THROWS_AS(ModeCase("qwen3.5-35b-a3b", {{"max_documents", "8"}}).dims(), Error); // of what is not packed
  CHECK(ModeCase("qwen3.5-35b-a3b", {{"max_documents", "8"}, {"packed", "true"}}).dims().sequences == 8);
}

TEST_CASE("packed documents under context parallelism: zig-zag is even, a contiguous cut has a busiest rank") {
  const std::vector<config::Setting> base{{"gpus", "8"}, {"context_parallel_size", "2"}, {"expert_model_parallel_size", "4"},
                                          {"seq_length", "4096"}, {"document_lengths", "[3072, 1024]"}};
  CHECK(ModeCase("qwen3.5-35b-a3b", base).dims().attention_keys == (3072 * 3072 + 1024 * 1024) / 4096);
  std::vector<config::Setting> cut = base;
  cut.push_back({"settings.cp_partition", "contiguous"});
  // Rank 0 reads 2048^2 / 2 pairs, rank 1 (3072^2 - 2048^2) / 2 + 1024^2 / 2: the busiest, of 2,048 tokens.
  CHECK(ModeCase("qwen3.5-35b-a3b", cut).dims().attention_keys == (3072 * 3072 - 2048 * 2048 + 1024 * 1024) / 2048);
}

TEST_CASE("LoRA: r (in + out) parameters a linear train, nothing else has gradients or optimizer state") {
  const ModeCase c("llama3-70b", one_gpu({{"lora_rank", "16"}}));
  const model::StaticState s = model::static_state(c.profile.model, c.profile.run, 0);
  // qkv 8192 -> 10240, proj 8192 -> 8192, fc1 8192 -> 57344, fc2 28672 -> 8192.
  const std::int64_t adapters = 12 * 16 * (8192 + 10240 + 8192 + 8192 + 8192 + 57344 + 28672 + 8192);
  CHECK(s.dense.gradients == 4 * adapters);
  CHECK(s.dense.optimizer == 12 * adapters);
  const ModeCase full("llama3-70b", one_gpu());
  CHECK(s.dense.parameters == model::static_state(full.profile.model, full.profile.run, 0).dense.parameters + 2 * adapters);
}

TEST_CASE("LoRA: inputs whose only reader was a frozen weight's gradient are not kept") {
  auto retained = [](std::vector<config::Setting> more) {
    const ModeCase c("llama3-70b", one_gpu(std::move(more)));
    plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
    return e.layers(plan::Setting::of(c.profile.run))[1].retained / 4096;
  };
  const Bytes full = retained({}), on_qkv = retained({{"lora_rank", "16"}, {"lora_targets", "[linear_qkv]"}});
  // Gone: the normalised input of FC1 (2h) and FC2's input (2 ffn). attn stays, the core reads it; the
  // normalised input of qkv stays for its adapter. New: the 16 low-rank columns.
  CHECK(full - on_qkv == 2 * 8192 + 2 * 28672 - 2 * 16);
  const Bytes on_fc2 = retained({{"lora_rank", "16"}, {"lora_targets", "[linear_fc2]"}});
  CHECK(full - on_fc2 == 2 * 8192 + 2 * 8192 - 2 * 16); // the normalised inputs of qkv and FC1
}

TEST_CASE("LoRA under sequence parallelism: the adapter keeps the gathered input") {
  auto retained = [](const char* targets) {
    const ModeCase c("llama3-70b", {{"num_hidden_layers", "12"}, {"gpus", "4"}, {"tensor_model_parallel_size", "4"}, {"pipeline_model_parallel_size", "1"},
                                {"virtual_pipeline_model_parallel_size", "1"}, {"global_batch_size", "1"}, {"lora_rank", "16"}, {"lora_targets", targets}});
    plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
    return e.layers(plan::Setting::of(c.profile.run))[1].retained;
  };
  // All 4,096 rows of h in bf16 and 16 columns of the low-rank product.
  CHECK(retained("[linear_proj, linear_qkv]") - retained("[linear_proj]") == 4096 * (2 * 8192 + 2 * 16));
}

TEST_CASE("frozen weights in 8 and 4 bits: linear weights shrink, everything else stays") {
  auto parameters = [](const char* bits) {
    const ModeCase c("llama3-70b", one_gpu({{"lora_rank", "16"}, {"frozen_weight_bits", bits}}));
    return model::static_state(c.profile.model, c.profile.run, 0).dense.parameters;
  };
  const std::int64_t linears = std::int64_t{12} * 8192 * (10240 + 8192 + 57344 + 28672);
  CHECK(parameters("16") - parameters("4") == linears * 2 - (linears / 2 + linears / 16)); // QLoRA: 0.5 bits a weight for constants
  const std::int64_t rows = 12 * (10240 + 8192 + 57344 + 8192);
  CHECK(parameters("16") - parameters("8") == linears - 4 * rows);
}

TEST_CASE("optimizer on the host: the share leaves the device, with an fp32 copy of its gradients") {
  const ModeCase plain("llama3-70b", one_gpu()), half("llama3-70b", one_gpu({{"optimizer_offload_fraction", "0.5"}}));
  const model::StaticState a = model::static_state(plain.profile.model, plain.profile.run, 0);
  const model::StaticState b = model::static_state(half.profile.model, half.profile.run, 0);
  CHECK(a.dense.optimizer - b.dense.optimizer == a.dense.optimizer / 2);
  CHECK(b.host == a.dense.optimizer / 2 + a.dense.gradients / 2);
  CHECK(half.estimate().optimizer_seconds > plain.estimate().optimizer_seconds);
}

TEST_CASE("precision-aware optimizer and bf16 gradients: bytes a parameter by Megatron's table") {
  // 2 + g + m + a1 + a2 with g 2, remainders 2, moments 1 and 2.
  const ModeCase c("llama3-70b", one_gpu({{"use_precision_aware_optimizer", "true"}, {"main_grads_dtype", "bf16"}, {"main_params_dtype", "bf16"},
                                      {"exp_avg_dtype", "fp8"}, {"exp_avg_sq_dtype", "bf16"}}));
  const model::StaticState s = model::static_state(c.profile.model, c.profile.run, 0);
  CHECK(s.dense.gradients == s.dense.parameters);
  CHECK(s.dense.optimizer == s.dense.parameters / 2 * 5);
}

TEST_CASE("activation offload: the bytes leave the device between the passes and cross the link twice") {
  const ModeCase plain("llama3-70b", one_gpu()), off("llama3-70b", one_gpu({{"cpu_offloading", "true"}, {"cpu_offloading_num_layers", "4"}}));
  const plan::Estimate a = plain.estimate(), b = off.estimate();
  const plan::RankEstimate &ra = a.worst_rank(), &rb = b.worst_rank();
  CHECK(rb.offloaded > 0);
  CHECK(ra.retained_per_micro_batch - rb.retained_per_micro_batch == rb.offloaded);
  // Of a layer all but its input and statistics a row: ln_out, q, k, v, attn, lse, m_in, its norm, FC1, act.
  const Bytes layer = 4096 * (2 * (8192 + 8192 + 1024 + 1024 + 8192 + 8192 + 8192) + 4 * 64 + 6 * 28672 + 2 * 4);
  CHECK(rb.offloaded == 4 * layer);
  CHECK(rb.host_bytes == rb.offloaded);
  CHECK(b.peak_bytes < a.peak_bytes);
  CHECK(rb.offload_seconds == doctest::Approx(static_cast<double>(rb.offloaded) / off.hardware.host_link).scale(0));
  CHECK(b.step_seconds >= a.step_seconds);
}

TEST_CASE("fine-grained offload: the inputs of named modules, above a size") {
  const std::vector<config::Setting> on{{"fine_grained_activation_offloading", "true"}, {"offload_modules", "[moe_act]"}};
  const ModeCase c("qwen3.5-35b-a3b", on);
  // FC1's output: 2 x 512 columns of 8 rows a token in each of 40 layers; the probabilities are too small.
  CHECK(c.estimate().worst_rank().offloaded == Bytes{40} * 4096 * 8 * 1024 * 2);
}

TEST_CASE("fp8 and fp4: linears keep a quantised input, by recipe") {
  auto retained = [](const char* key, const char* value) {
    const ModeCase c("llama3-70b", one_gpu({{key, value}}));
    plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
    return e.layers(plan::Setting::of(c.profile.run))[1].retained;
  };
  const Bytes bf16 = retained("fp4", "false");
  // Gone in bf16: both normalised inputs and FC2's (the attention output stays, its core reads it); new: four inputs.
  const Bytes gone = 4096 * 2 * (8192 + 8192 + 28672), elements = 4096 * (8192 + 8192 + 8192 + 28672);
  CHECK(bf16 - retained("fp8_recipe", "mxfp8") == gone - (elements + elements / 32));
  CHECK(bf16 - retained("fp8_recipe", "blockwise") == gone - (elements + elements / 32)); // 4 bytes a block of 128
  CHECK(bf16 - retained("fp8_recipe", "tensorwise") == gone - (elements + 4 * 4));
  CHECK(bf16 - retained("fp4", "true") == gone - (elements / 2 + elements / 16));
}

TEST_CASE("fp8: weights are held quantised, and sizes that a recipe refuses are named with their multiple") {
  const ModeCase c("llama3-70b", one_gpu({{"fp8_recipe", "mxfp8"}}));
  const std::int64_t linears = std::int64_t{12} * 8192 * (10240 + 8192 + 57344 + 28672);
  Bytes weights = 0;
  const plan::Estimate estimate = c.estimate();
  for (const model::LibraryBuffer& b : estimate.worst_rank().library)
    if (b.name == "quantised weights") weights = b.bytes;
  CHECK(weights == 2 * (linears + linears / 32));
  // A GDN projection over TP 8: (2 x 2048 + 2 x 4096 + 2 x 32) / 8 = 1,544 columns, no multiple of 16 or 32.
  config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b", {{"tensor_model_parallel_size", "8"}, {"sequence_parallel", "true"},
                                                                       {"expert_model_parallel_size", "8"}, {"fp8_recipe", "mxfp8"}});
  const config::Hardware h = config::Profiles().hardware("h200");
  plan::Estimator e(p.model, p.run, h);
  std::string text;
  for (const cost::Assumption& a : e.assumptions())
    if (a.key == "alignment.in_proj") text = a.text;
  CHECK(text.find("1544") != std::string::npos);
  CHECK(text.find("multiple of 32") != std::string::npos);
}

TEST_CASE("the simulated reserve holds what the mode leaves on the device") {
  for (const std::vector<config::Setting>& more : std::vector<std::vector<config::Setting>>{
           {}, {{"lora_rank", "16"}, {"frozen_weight_bits", "4"}}, {{"optimizer_offload_fraction", "0.5"}}, {{"expandable_segments", "true"}},
           {{"cpu_offloading", "true"}, {"cpu_offloading_num_layers", "4"}}}) {
    const ModeCase c("llama3-70b", one_gpu(more));
    if (!more.empty()) CAPTURE(more[0].key);
    plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
    const plan::Estimate x = e.evaluate({});
    const plan::ReservedBand band = e.reserved(x).value();
    CHECK(band.low >= x.peak_bytes - (Bytes{1} << 20));
    CHECK(static_cast<double>(band.low) < 1.06 * static_cast<double>(x.peak_bytes)); // rounding and splitting, nothing counted twice
    CHECK(static_cast<double>(band.high) < 1.10 * static_cast<double>(band.low));
  }
}

TEST_CASE("no reserve is simulated beyond what any device holds") {
  for (const char* expandable : {"false", "true"}) {
    const config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b", {{"seq_length", "4194304"}, {"expandable_segments", expandable}});
    const config::Hardware h = config::Profiles().hardware("h200");
    plan::Estimator e(p.model, p.run, h);
    const plan::Estimate x = e.evaluate({});
    CHECK(x.peak_bytes > Bytes{512} << 30);
    CHECK(!e.reserved(x));
  }
}

TEST_CASE("every gap of measurement is named, and widens the band") {
  config::Hardware h = config::Profiles().hardware("b200");
  auto band = [&] {
    config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b");
    plan::Estimator e(p.model, p.run, h);
    const plan::Estimate x = e.evaluate({});
    CHECK(x.step_low < x.step_seconds);
    CHECK(x.step_high > x.step_seconds);
    return std::pair(x.step_high / x.step_seconds, e.assumptions());
  };
  auto names_rule = [](const std::vector<cost::Assumption>& assumptions) {
    for (const cost::Assumption& a : assumptions)
      if (a.key == "efficiency.upstream.rule.forward") return true;
    return false;
  };
  const auto [wide, without] = band(); // no rule has been measured on a B200
  CHECK(names_rule(without));
  // With what would have been assumed as if it were measured: the same time, in a narrower band.
  h.efficiencies.push_back({"upstream", "rule", "forward", {}, 0.10, "test"});
  h.efficiencies.push_back({"upstream", "rule", "backward", {}, 0.08, "test"});
  const auto [narrow, with] = band();
  CHECK(!names_rule(with));
  CHECK(narrow < wide);
}

TEST_CASE("replays by module and layer kind add up to the recompute time of the step") {
  const ModeCase c("qwen3.5-35b-a3b", {{"recompute_granularity", "selective"}, {"recompute_modules", "[gdn_qkv, core_attn, moe_act]"}});
  plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
  const plan::Setting s = plan::Setting::of(c.profile.run);
  const plan::Estimate x = e.evaluate(s);
  double sum = 0;
  int gdn = 0, attention = 0;
  for (const plan::ReplayCost& r : e.replay_costs(s)) {
    sum += r.seconds;
    gdn += r.module == "gdn_qkv" && r.layer_kind == "gdn+moe";
    attention += r.module == "core_attn" && r.layer_kind == "attention+moe";
  }
  CHECK(gdn == 1);
  CHECK(attention == 1);
  CHECK(sum == doctest::Approx(x.recompute_seconds).scale(0));
}
