#include <doctest/doctest.h>

#include "model/dims.h"
#include "plan/estimate.h"
#include "tests/plan/published.h"

using namespace gdn;

// The files of examples/modes, one figure of each counted by hand or published.
namespace {

struct Example {
  config::ModelProfile profile;
  config::Hardware hardware;

  explicit Example(const std::string& name, std::vector<config::Setting> settings = {})
      : profile(config::Profiles().model(test::source_file("examples/modes/" + name + ".yaml"), settings)),
        hardware(config::Profiles().hardware(profile.hardware)) {}

  plan::Setting setting() const { return plan::Setting::of(profile.run); }
  plan::Estimate estimate() const { return plan::Estimator(profile.model, profile.run, hardware).evaluate(setting()); }
  // What the first layer of a kind keeps of one micro-batch.
  Bytes retained(const std::string& kind) const {
    plan::Estimator e(profile.model, profile.run, hardware);
    for (const plan::LayerEstimate& l : e.layers(setting()))
      if (l.kind == kind) return l.retained;
    FAIL("no layer " << kind);
    return 0;
  }
  std::int64_t rows() const { return model::Dims::of(profile.model, profile.run).routed_rows; }
};

// A row that an expert of the 35B gets keeps its permuted input (2h), FC1's output (2 x 2f), the activation (2f)
// and its probability (fp32).
constexpr Bytes kRow = 2 * 2048 + 4 * 512 + 2 * 512 + 4;
constexpr std::int64_t kBalanced = 4096 * 8; // tokens x choices

} // namespace

TEST_CASE("routing-factor: twice the rows, each with what a row keeps") {
  const Example x("routing-factor"), balanced("routing-factor", {{"moe_imbalance", "1"}});
  CHECK(x.rows() == 2 * kBalanced);
  CHECK(x.retained("gdn+moe") - balanced.retained("gdn+moe") == kBalanced * kRow);
}

TEST_CASE("routing-histogram: 990 of 1,000 steps stay at or below a factor of 2") {
  CHECK(Example("routing-histogram").rows() == 2 * kBalanced);
}

TEST_CASE("routing-worst: all rows of all 8 ranks may arrive, and with moe recomputed no layer keeps one") {
  const Example x("routing-worst"), balanced("routing-worst", {{"moe_imbalance", "1"}});
  CHECK(x.rows() == 8 * kBalanced); // 32 local experts take all 8 choices
  CHECK(x.retained("gdn+moe") == balanced.retained("gdn+moe"));
}

TEST_CASE("capacity: 4,096 x 8 / 256 x 1.25 rows an expert and rank, padded") {
  const Example x("capacity"), dropless("capacity", {{"moe_expert_capacity_factor", "null"}});
  CHECK(x.rows() == 160 * 32 * 8);
  CHECK(x.retained("gdn+moe") - dropless.retained("gdn+moe") == (160 * 32 * 8 - kBalanced) * kRow);
}

TEST_CASE("documents: chunks start with each document, attention reads its own one") {
  const Example x("documents");
  const model::Dims d = model::Dims::of(x.profile.model, x.profile.run);
  CHECK(d.chunks == 32 + 20 * 2 + 2);
  CHECK(d.attention_keys == (2000 * 2000 + 20 * 100 * 100 + 96 * 96 + 4095) / 4096);
}

TEST_CASE("lora: 16 (in + out) parameters a linear have gradients, nothing else") {
  // Qwen3.5-27B: 48 GDN and 16 attention layers, h 5120, ffn 17408; the depth of MTP is one more attention layer.
  const std::int64_t gdn = (5120 + 2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + (48 * 128 + 5120),
                     attention = (5120 + (2 * 24 + 2 * 4) * 256) + (24 * 256 + 5120), mlp = (5120 + 2 * 17408) + (17408 + 5120);
  const std::int64_t adapters = 16 * (48 * gdn + 17 * attention + 65 * mlp);
  const Bytes gradients = Example("lora").estimate().worst_rank().state.dense.gradients;
  CHECK(gradients == 4 * adapters); // every one a multiple of 64 elements, so nothing is padded
}

TEST_CASE("lora-8bit, lora-4bit: the frozen linears shrink, everything else stays") {
  auto parameters = [](const char* name) { return Example(name).estimate().worst_rank().state.dense.parameters; };
  const std::int64_t gdn = 5120 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 48 * 128 * 5120, attention = 5120 * (2 * 24 + 2 * 4) * 256 + 24 * 256 * 5120,
                     mlp = 3 * 5120 * 17408;
  const std::int64_t linears = 48 * gdn + 17 * attention + 65 * mlp;
  // One fp32 scale a row in 8 bits, one a block of 64 in 4.
  const std::int64_t rows = 48 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48 + 5120) + 17 * ((2 * 24 + 2 * 4) * 256 + 5120) + 65 * (2 * 17408 + 5120);
  CHECK(parameters("lora") - parameters("lora-8bit") == linears - 4 * rows);
  CHECK(parameters("lora") - parameters("lora-4bit") == linears * 2 - linears / 2 - linears / 16);
}

TEST_CASE("optimizer-dtypes: 2 + 2 bytes a parameter, and 2 + 1 + 2 of its shard") {
  const model::StaticState s = Example("optimizer-dtypes").estimate().worst_rank().state;
  CHECK(s.dense.gradients == s.dense.parameters);
  CHECK(s.dense.optimizer == s.dense.parameters / 2 / 8 * 5); // over 8 data-parallel ranks
  CHECK(s.expert.optimizer == s.expert.parameters / 2 * 5);   // EP 8: each rank its own experts
}

TEST_CASE("optimizer-offload: half of the state leaves, with an fp32 copy of its gradients' shard") {
  const model::StaticState whole = Example("optimizer-offload", {{"optimizer_offload_fraction", "0"}}).estimate().worst_rank().state,
                           half = Example("optimizer-offload").estimate().worst_rank().state;
  const Bytes state = whole.dense.optimizer + whole.expert.optimizer;
  CHECK(half.dense.optimizer + half.expert.optimizer == state / 2);
  CHECK(half.host == state / 2 + state / 12 * 4 / 2);
}

TEST_CASE("fp8, fp4: four inputs a layer in 8 or 4 bits with their scales, instead of three in bf16") {
  auto retained = [](const char* name, std::vector<config::Setting> plain) { return Example(name, std::move(plain)).retained("attention+mlp"); };
  // Gone: both normalised inputs and FC2's; the attention output stays, its core reads it.
  const Bytes gone = 4096 * 2 * (8192 + 8192 + 28672), elements = 4096 * (8192 + 8192 + 8192 + 28672);
  CHECK(retained("fp8", {{"fp8_recipe", "null"}}) - retained("fp8", {}) == gone - (elements + elements / 32));
  CHECK(retained("fp4", {{"fp4", "false"}}) - retained("fp4", {}) == gone - (elements / 2 + elements / 16));
}

TEST_CASE("activation-offload: FC1's output of every routed row goes to the host") {
  CHECK(Example("activation-offload").estimate().worst_rank().offloaded == Bytes{40} * kBalanced * 1024 * 2);
}

TEST_CASE("layer-offload: what four layers keep but for their inputs and statistics") {
  // A row: ln_out, q, k, v, attn, proj's sum, its norm, FC1's two halves and the activation in bf16; the
  // log-sum-exp of 64 heads and two statistics in fp32.
  const Bytes layer = 4096 * (2 * (8192 + 8192 + 1024 + 1024 + 8192 + 8192 + 8192) + 4 * 64 + 6 * 28672 + 2 * 4);
  CHECK(Example("layer-offload").estimate().worst_rank().host_bytes == 4 * layer);
}

TEST_CASE("uneven-pipeline: 17 layers, then 23") {
  const plan::Estimate e = Example("uneven-pipeline").estimate();
  REQUIRE(e.ranks.size() == 2);
  CHECK(e.ranks[0].layers == 17);
  CHECK(e.ranks[1].layers == 23);
}

TEST_CASE("virtual-stages: 2 (PP - 1) + (VP - 1) PP chunks of warm-up, and one more, wait for their backward") {
  const plan::Estimate e = Example("virtual-stages").estimate();
  for (std::int64_t r = 0; r < 4; ++r) CHECK(e.ranks[static_cast<size_t>(r)].in_flight == 2 * (4 - r - 1) + 4 + 1);
}

TEST_CASE("mtp: the published 844,640,768 parameters, a rank's share of their experts, and a copy of the embedding") {
  auto parameters = [](std::vector<config::Setting> s) {
    const model::StaticState state = Example("mtp", std::move(s)).estimate().ranks[1].state;
    return state.dense.parameters + state.expert.parameters;
  };
  const std::int64_t experts = std::int64_t{256} * 3 * 2048 * 512, embedding = std::int64_t{248320} * 2048;
  const Bytes more = parameters({}) - parameters({{"train_mtp", "false"}}), counted = 2 * (844640768 - experts + experts / 8 + embedding);
  CHECK(more >= counted);
  CHECK(more < counted + 2 * 64 * 64); // tensors start on multiples of 64 elements
}

TEST_CASE("cuda-graphs: a static input and output gradient of h columns for each of 40 layers") {
  const plan::Estimate e = Example("cuda-graphs").estimate();
  Bytes buffers = 0, launches = 0, plain = 0;
  for (const plan::OutsideRow& row : e.outside) {
    if (row.name.find("static inputs") != std::string::npos) buffers = row.bytes;
    if (row.name.find("recorded launches") != std::string::npos) launches = row.bytes;
    CHECK(!row.source.empty());
  }
  for (const plan::OutsideRow& row : Example("cuda-graphs", {{"cuda_graph_impl", "none"}}).estimate().outside) plain += row.bytes;
  CHECK(buffers == Bytes{40} * 2 * 4096 * 2048 * 2);
  CHECK(launches > 0);
  CHECK(e.categories[Category::Context] == plain + buffers + launches);
}

TEST_CASE("expandable-segments: the simulated reserve holds the tensors and wastes less") {
  auto band = [](std::vector<config::Setting> s) {
    const Example x("expandable-segments", std::move(s));
    plan::Estimator e(x.profile.model, x.profile.run, x.hardware);
    const plan::Estimate estimate = e.evaluate(x.setting());
    return std::pair(estimate.peak_bytes, e.reserved(estimate, 16000).value());
  };
  const auto [peak, with] = band({});
  const auto [same, without] = band({{"settings.expandable_segments", "false"}});
  CHECK(peak == same);
  CHECK(with.low >= peak - (Bytes{1} << 20));
  CHECK(with.low < without.low);
}
