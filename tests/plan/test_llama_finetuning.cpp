#include <doctest/doctest.h>

#include "config/profiles.h"
#include "plan/estimate.h"

using namespace gdn;

// Llama3-70B fine-tuning on 32 H100 (NVIDIA-NeMo/Megatron-Bridge#3107 and its memory-tuning guide): seven
// rows, one thing changed in each. They ran in fp8, so the order is what is compared.
namespace {

plan::Estimate row(int tp, int pp, int vp, const char* modules) {
  const std::vector<config::Setting> settings{{"tensor_model_parallel_size", std::to_string(tp)},
                                              {"pipeline_model_parallel_size", std::to_string(pp)},
                                              {"virtual_pipeline_model_parallel_size", std::to_string(vp)},
                                              {"recompute_granularity", "selective"}, {"recompute_modules", modules}};
  const config::ModelProfile p = config::Profiles().model("llama3-70b", settings);
  const config::Hardware hardware = config::Profiles().hardware("h100");
  plan::Estimator e(p.model, p.run, hardware);
  return e.evaluate(plan::Setting::of(p.run));
}

} // namespace

TEST_CASE("Llama3-70B fine-tuning: recompute and parallelism in the published order") {
  const plan::Estimate l1 = row(4, 4, 5, "[core_attn]"), l2 = row(4, 4, 5, "[mlp]"), l3 = row(4, 4, 5, "[mlp, core_attn]"),
                       l4 = row(4, 4, 5, "[core_attn, layernorm]"), l6 = row(4, 8, 5, "[core_attn]"), l7 = row(8, 4, 5, "[core_attn]");
  // mlp saves memory for a lot of speed (58.8 to 55.6 GB, 704 to 594 TFLOP/s).
  CHECK(l2.peak_bytes < l1.peak_bytes);
  CHECK(l2.step_seconds > 1.05 * l1.step_seconds);
  // core_attn adds nothing to it and costs time.
  CHECK(static_cast<double>(l3.peak_bytes) > 0.99 * static_cast<double>(l2.peak_bytes));
  CHECK(l3.step_seconds > l2.step_seconds);
  // layernorm is no improvement: the norms are fused.
  CHECK(l4.peak_bytes >= l1.peak_bytes);
  CHECK(l4.step_seconds >= l1.step_seconds);
  // More pipeline stages and more tensor parallelism save memory, in this order, and cost speed.
  CHECK(l6.peak_bytes < l1.peak_bytes);
  CHECK(l7.peak_bytes < l6.peak_bytes);
  CHECK(l6.step_seconds > l1.step_seconds);
  CHECK(l7.step_seconds > l6.step_seconds);
}
