#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "config/profiles.h"
#include "core/error.h"
#include "tests/trainer/hf_reference.h"
#include "trainer/hf/architecture.h"
#include "trainer/hf/parity.h"

// The comparison itself: what it measures, and that it notices. Its reference here is one stack's own
// result; test_hf_parity.cpp compares with another implementation's.
using namespace gdn;
using namespace gdn::trainer;
using test::HfFolder;
using test::TemporaryFolder;

using test::profile_of;
using test::write_reference;

namespace {

hf::ParityReport compare(const std::filesystem::path& folder, const char* stack) {
  const config::ModelProfile p = profile_of(folder, stack);
  CpuDevice device;
  return hf::compare_with_reference(folder, p.model, p.run, {}, device);
}

} // namespace

TEST_CASE("parity: what is measured") {
  const std::vector<float> expected{3, 0, 0, -4, 0, 0}, found{3, 0, 0.5f, -4, 0, 0};
  const hf::Difference d = hf::difference("t", {2, 3}, found, expected, 0.2, false);
  CHECK(d.largest == doctest::Approx(0.125)); // 0.5 of 4
  CHECK(d.norm == doctest::Approx(0.1));      // 0.5 of 5
  CHECK(d.coordinate() == "[0, 2]");
  CHECK(d.ok());
  CHECK(hf::difference("t", {2, 3}, found, expected, 0.11, true).ok());
  CHECK_FALSE(hf::difference("t", {2, 3}, found, expected, 0.11, false).ok());

  std::vector<float> broken = found;
  broken[4] = std::numeric_limits<float>::quiet_NaN();
  const hf::Difference nan = hf::difference("t", {2, 3}, broken, expected, 1e9, true);
  CHECK_FALSE(nan.ok());
  CHECK(nan.coordinate() == "[1, 1]");
  const std::vector<float> zero(6, 0);
  CHECK(hf::difference("t", {6}, zero, zero, 0, true).ok());
  CHECK_FALSE(hf::difference("t", {6}, found, zero, 1e9, true).ok()); // nothing is near zero
  CHECK_THROWS_AS(hf::difference("t", {2}, zero, std::vector<float>(2), 0, true), Error);
}

TEST_CASE("parity: both stacks agree, on every layout") {
  for (const char* type : {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}) {
    CAPTURE(type);
    TemporaryFolder folder;
    const HfFolder hf{.type = type, .tied = std::string_view(type) == "qwen3_5_text"};
    hf.write(folder / "c");
    write_reference(folder / "c");
    const hf::ParityReport report = compare(folder / "c", "megatron");
    CHECK(report.rows.size() == 5 + hf.tensors().size());
    if (const hf::Difference* d = report.first_mismatch()) FAIL_CHECK(hf::describe(*d));
  }
}

TEST_CASE("parity: one wrong value in any tensor is found, at its place") {
  for (const char* name : {"hidden.1", "logits", "loss", "grad.model.layers.0.linear_attn.in_proj_ba.weight",
                           "grad.model.layers.1.self_attn.q_proj.weight", "grad.model.layers.0.mlp.experts.gate_up_proj"}) {
    CAPTURE(name);
    TemporaryFolder folder;
    HfFolder{.type = "qwen3_next"}.write(folder / "c");
    size_t place = 0;
    write_reference(folder / "c", [&](const std::string& tensor, std::vector<float>& values) {
      if (tensor != name) return;
      place = values.size() / 2;
      values[place] += 0.01f * std::sqrt(static_cast<float>(values.size())) + 0.1f;
    });
    const hf::ParityReport report = compare(folder / "c", "native");
    REQUIRE(report.first_mismatch() != nullptr);
    CHECK(report.first_mismatch()->name == name);
    CHECK(report.first_mismatch()->worst == static_cast<std::int64_t>(place));
    for (const hf::Difference& d : report.rows) CHECK(d.ok() == (d.name != name));
  }
}

TEST_CASE("parity: a changed weight is found where it first matters") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_5_text"}.write(folder / "c");
  write_reference(folder / "c");
  std::string bytes = test::read_bytes(folder / "c" / "model.safetensors");
  const SafetensorsFile file(folder / "c" / "model.safetensors");
  bytes[static_cast<size_t>(file.at("model.layers.1.mlp.up_proj.weight").offset) + 1] ^= 0x40; // its first value's exponent
  test::write_bytes(folder / "c" / "model.safetensors", bytes);
  const hf::ParityReport report = compare(folder / "c", "native");
  REQUIRE(report.first_mismatch() != nullptr);
  CHECK(report.first_mismatch()->name == "hidden.2"); // what leaves layer 1
}

TEST_CASE("parity: a reference that lacks something is refused by name") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_5_text"}.write(folder / "c");
  CHECK_THROWS_WITH_AS(compare(folder / "c", "native"), doctest::Contains("reference.safetensors"), Error);
  SafetensorsWriter(folder / "c" / hf::kReferenceFile, {}).commit();
  CHECK_THROWS_WITH_AS(compare(folder / "c", "native"), doctest::Contains("'input_ids'"), Error);
}

TEST_CASE("parity: weights of another model are refused by key") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_next"}.write(folder / "c");
  config::Model model = config::Profiles().model((folder / "c").string()).model;
  CHECK_NOTHROW(hf::require_same_architecture(model, folder / "c"));
  model.moe.top_k = 1;
  CHECK_THROWS_WITH_AS(hf::require_same_architecture(model, folder / "c"), doctest::Contains("num_experts_per_tok is 2, the model to be run has 1"), Error);
  model.attention.rope_theta = 5;
  CHECK_THROWS_WITH_AS(hf::require_same_architecture(model, folder / "c"), doctest::Contains("rope_theta"), Error);
}
