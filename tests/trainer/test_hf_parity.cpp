#include <doctest/doctest.h>

#include <cmath>

#include "config/profiles.h"
#include "tests/trainer/hf_cases.h"
#include "trainer/exact.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/parity.h"
#include "trainer/hf/weights.h"

// Checkpoints of transformers with the loss, logits, hidden states and gradients that it computes from
// them, in the folder that GDN_HF_CASES names (meson option hf_cases).
using namespace gdn;
using namespace gdn::trainer;

namespace {

hf::ParityReport compare(const char* name, const char* stack, DType dtype) {
  const std::filesystem::path folder = test::hf_cases() / name;
  config::ModelProfile profile = config::Profiles().model(folder.string());
  profile.run.stack = stack;
  profile.run.dtype = dtype;
  CpuDevice device;
  return hf::compare_with_reference(folder, profile.model, profile.run, {}, device);
}

std::string text_of(const hf::ParityReport& report) {
  report::Document document;
  hf::add_to(document, report);
  return report::render_text(document);
}

// Hidden states, logits, loss and a gradient for each of `weights`, to the last digits of fp32.
void check_fp32(const char* name, const char* stack, size_t weights) {
  const hf::ParityReport report = compare(name, stack, DType::FP32);
  INFO(text_of(report));
  CHECK(report.rows.size() == 5 + weights);
  CHECK(report.first_mismatch() == nullptr);
}

} // namespace

TEST_CASE("hf: Qwen3.5 dense, native, is what transformers computes") { check_fp32("qwen35-dense", "native", 28); }
TEST_CASE("hf: Qwen3.5 dense, megatron, is what transformers computes") { check_fp32("qwen35-dense", "megatron", 28); }
TEST_CASE("hf: Qwen3-Next, native, is what transformers computes") { check_fp32("next-moe", "native", 34); }
TEST_CASE("hf: Qwen3-Next, megatron, is what transformers computes") { check_fp32("next-moe", "megatron", 34); }

TEST_CASE("hf: bf16 stays within its roundings") {
  for (const char* name : {"qwen35-dense", "next-moe"})
    for (const char* stack : {"native", "megatron"}) {
      const hf::ParityReport report = compare(name, stack, DType::BF16);
      INFO(text_of(report));
      CHECK(report.first_mismatch() == nullptr);
    }
}

// Under a strong decay transformers' fp32 gradients of A_log and dt_bias are off by up to 1.8 %. These
// are exact: complex steps (1e-30) through the token-by-token recurrence in fp64.
TEST_CASE("hf: gradients of the decay are the exact ones") {
  struct Exact {
    const char* name;
    double a_log[2], dt_bias[2], alpha_rows[2]; // alpha_rows: sums over the input of in_proj's rows
  };
  const Exact cases_of[] = {
      {"qwen35-dense", {-5.8944005565986394e-06, 5.116443335114497e-06}, {-4.950545886849461e-06, 3.1925084320101466e-06},
       {1.4315406158357441e-05, 1.8617667943356856e-05}},
      {"next-moe", {5.79207227763111e-05, -6.503161891929912e-06}, {3.886496543191893e-05, -5.429309834697762e-06},
       {0.00013221604330060921, -0.00033781951223394455}}};
  for (const Exact& exact : cases_of)
    for (const char* stack : {"native", "megatron"}) {
      CAPTURE(exact.name);
      CAPTURE(stack);
      const std::filesystem::path folder = test::hf_cases() / exact.name;
      config::ModelProfile profile = config::Profiles().model(folder.string());
      profile.run.stack = stack;
      profile.run.dtype = DType::FP32;
      const hf::Reference reference(folder);
      ExactDevice device; // the CPU, and doubles beside it
      const config::Model model = hf::parity_model(profile.model);
      Session session(model, hf::parity_run(profile.run, reference), device);
      hf::load(hf::Checkpoint(folder, model, session.parameters().table()), session.parameters());
      session.use({});
      session.run({reference.tokens()});
      const std::vector<float> a_log = session.parameters().gradient("layers.0.gdn.A_log");
      const std::vector<float> dt_bias = session.parameters().gradient("layers.0.gdn.dt_bias");
      const std::vector<float> in_proj = session.parameters().gradient("layers.0.gdn.in_proj");
      double off = 0, norm = 0; // of alpha's rows, the last two
      for (size_t head = 0; head < 2; ++head) {
        double alpha = 0;
        for (size_t c = 0; c < 128; ++c) alpha += in_proj[in_proj.size() - (2 - head) * 128 + c];
        off += std::pow(alpha - exact.alpha_rows[head], 2);
        norm += std::pow(exact.alpha_rows[head], 2);
        CHECK(a_log[head] == doctest::Approx(exact.a_log[head]).scale(0).epsilon(1e-4));
        CHECK(dt_bias[head] == doctest::Approx(exact.dt_bias[head]).scale(0).epsilon(1e-4));
        const auto in_double = [&](const char* name) { return device.values(session.parameters().at(name).gradient, 2)[head]; };
        CHECK(in_double("layers.0.gdn.A_log") == doctest::Approx(exact.a_log[head]).scale(0).epsilon(1e-9));
        CHECK(in_double("layers.0.gdn.dt_bias") == doctest::Approx(exact.dt_bias[head]).scale(0).epsilon(1e-9));
      }
      CHECK(std::sqrt(off / norm) < 1e-4);
    }
}
