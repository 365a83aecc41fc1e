#include <doctest/doctest.h>

#include <algorithm>

#include "config/profiles.h"
#include "tests/trainer/hf_cases.h"
#include "trainer/cpu/device.h"
#include "trainer/decode/decoder.h"
#include "trainer/hf/parity.h"
#include "trainer/hf/weights.h"

// Prefill and decode against the logits that transformers computes with a full forward.
using namespace gdn;
using namespace gdn::trainer;

namespace {

void check_logits(const char* name, const char* stack, std::int64_t prefill) {
  const std::filesystem::path folder = test::hf_cases() / name;
  config::ModelProfile profile = config::Profiles().model(folder.string());
  profile.run.stack = stack;
  profile.run.dtype = DType::FP32;
  const hf::Reference reference(folder);
  const config::Model model = hf::parity_model(profile.model);
  const config::Run run = hf::parity_run(profile.run, reference);
  CpuDevice device;
  Session session(model, run, device);
  hf::load(hf::Checkpoint(folder, model, session.parameters().table()), session.parameters());
  const Batch batch = reference.tokens();
  const std::int64_t requests = reference.batch(), seq = reference.seq();
  Decoder decoder(model, run, device, session.parameters(), requests, seq);

  // All rows of the batch at once: a prompt each, then token by token.
  std::vector<float> logits(static_cast<size_t>(requests * seq * model.vocab));
  for (std::int64_t done = 0; done < seq;) {
    const std::int64_t n = done == 0 ? prefill : 1;
    std::vector<NewTokens> pass;
    for (std::int64_t r = 0; r < requests; ++r) {
      const auto first = batch.ids.begin() + r * seq + done;
      pass.push_back({requests - 1 - r, {first, first + n}});
    }
    const std::vector<float> out = decoder.append(pass);
    for (std::int64_t r = 0; r < requests; ++r)
      std::copy_n(out.begin() + r * n * model.vocab, n * model.vocab, logits.begin() + (r * seq + done) * model.vocab);
    done += n;
  }
  const bool experts = std::count(model.mlps.begin(), model.mlps.end(), config::MlpKind::Moe) > 0;
  const hf::Tolerance allowed = hf::tolerance(DType::FP32, experts);
  const hf::Difference d = hf::difference("logits", {requests, seq, model.vocab}, logits, reference.values("logits"), allowed.activation,
                                          !allowed.activation_by_largest);
  MESSAGE(std::string(name), ", ", std::string(stack), ", prefill ", prefill, ": off by ", d.measured(), ", allowed ", d.allowed);
  CHECK(d.ok());
}

} // namespace

TEST_CASE("decode: the logits of transformers, Qwen3.5 dense") {
  check_logits("qwen35-dense", "native", 1);
  check_logits("qwen35-dense", "megatron", 20);
}
TEST_CASE("decode: the logits of transformers, Qwen3-Next") {
  check_logits("next-moe", "native", 20);
  check_logits("next-moe", "megatron", 1);
}
