#include <doctest/doctest.h>

#include <cmath>

#include "core/error.h"
#include "model/flops.h"
#include "tests/program/lists.h"
#include "tests/unit/known_models.h"

using namespace gdn;
using namespace gdn::test;

TEST_CASE("model FLOPs per token at 4096 tokens, Megatron-LM's formula") {
  struct Row {
    const char* model;
    double without_mtp, with_mtp; // GFLOP, forward and backward, two decimals
  };
  const Row rows[] = {{"qwen3-next-80b-a3b", 22.74, 25.13}, {"qwen3.8-2.4t-a95b", 569.93, 589.18},
                      {"qwen3.5-397b-a17b", 101.38, 109.35}, {"qwen3.5-122b-a10b", 57.14, 63.02},
                      {"qwen3.5-35b-a3b", 18.94, 22.47},     {"qwen3.5-27b", 157.07, 167.39},
                      {"qwen3.5-9b", 48.73, 56.39},          {"qwen3.5-4b", 26.34, 30.98},
                      {"qwen3.5-2b", 11.71, 15.17},          {"qwen3.5-0.8b", 4.93, 6.63}};
  for (const Row& row : rows) {
    CAPTURE(row.model);
    const config::Model m = known_model(row.model);
    CHECK(std::round(model::model_flops_per_token(m, 4096, false).training() / 1e7) / 100 == doctest::Approx(row.without_mtp).epsilon(1e-9));
    CHECK(std::round(model::model_flops_per_token(m, 4096, true).training() / 1e7) / 100 == doctest::Approx(row.with_mtp).epsilon(1e-9));
  }
}

TEST_CASE("a GDN layer's FLOPs: parts, and no dependence on the sequence length") {
  const config::Model m = reference_model();
  for (std::int64_t seq : {4096, 131072}) {
    const config::Run run = one_gpu(config::Build::Te, "main", seq);
    const model::OpList gdn = model::megatron::module_list(m, run, "gdn");
    auto of = [&](const char* op) { return gdn.ops[static_cast<size_t>(gdn.find_op(op))].model_flops / static_cast<double>(seq); };
    double sum = 0;
    for (const model::Op& op : gdn.ops) sum += op.model_flops / static_cast<double>(seq);
    CHECK(of("in_proj") == 2.0 * 2048 * 12352);
    CHECK(of("conv1d") == 2.0 * 4 * 8192);
    CHECK(of("out_proj") == 2.0 * 4096 * 2048);
    CHECK(of("in_proj") + of("conv1d") + of("out_proj") == doctest::Approx(67.44e6).epsilon(1e-4));
    CHECK(sum == 71630848);
  }
  auto attention = [&](std::int64_t seq) {
    double sum = 0;
    for (const model::Op& op : model::megatron::module_list(m, one_gpu(config::Build::Te, "main", seq), "attention").ops)
      sum += op.model_flops / static_cast<double>(seq);
    return sum;
  };
  CHECK(attention(131072) - attention(4096) == 2.0 * 16 * 256 * (131072 - 4096)); // causal half
}

TEST_CASE("MTP is built like the last layer, and counted by frequency where Megatron-LM's figure is wanted") {
  const config::Model m = known_model("qwen3.5-35b-a3b");
  const auto built = model::model_flops_per_token(m, 4096), counted = model::model_flops_per_token(m, 4096, true, model::MtpMixer::ByFrequency);
  // Layer 41 is no multiple of 4, so it counts as GDN: 71,630,848 in place of the attention mixer.
  const double attention = 2.0 * (2048.0 * (2 * 4096 + 2 * 512) + 4096.0 * 2048) + 2.0 * 4096 * 4096;
  CHECK(built.mtp - counted.mtp == attention - 71630848);
}

TEST_CASE("a model without op lists has no FLOP count") {
  CHECK_THROWS_AS(model::model_flops_per_token(known_model("kimi-linear-48b-a3b"), 4096), Error);
}
