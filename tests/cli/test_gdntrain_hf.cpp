#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "command.h"
#include "config/model_io.h"
#include "config/yaml.h"
#include "tests/trainer/hf_reference.h"

// Hugging Face checkpoints as a user meets them: check --hf, run --hf and run --export-hf.
using namespace gdn;
using test::HfFolder;
using test::Result;
using test::TemporaryFolder;

namespace {

Result check(const std::filesystem::path& folder, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{std::getenv("GDNTRAIN"), "check", "--hf", folder.string(), "--device", "cpu"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return test::run(arguments);
}

// Long lines are wrapped.
bool has(std::string text, const char* words) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.find(words) != std::string::npos;
}

} // namespace

TEST_CASE("check: a checkpoint that agrees ends 0, with a row per tensor and stack") {
  TemporaryFolder folder;
  const HfFolder hf{.type = "qwen3_next"};
  hf.write(folder / "c");
  test::write_reference(folder / "c");
  const Result r = check(folder / "c");
  CHECK(r.status == 0);
  CHECK(r.err.empty());
  for (const char* words : {"stack native, fp32, on cpu", "stack megatron, fp32, on cpu", "hidden.2", "logits", "loss",
                            "grad.model.layers.0.linear_attn.in_proj_qkvz.weight"})
    CHECK_MESSAGE(has(r.out, words), words);

  const Result json = check(folder / "c", {"--format", "json", "--stack", "native", "--modules", "gdn_norm_out"});
  CHECK(json.status == 0);
  const auto root = nlohmann::json::parse(json.out);
  CHECK(root["schema"] == "gdn.check/1");
  REQUIRE(root["results"].size() == 1);
  CHECK(root["results"][0]["ok"] == true);
  CHECK(root["results"][0]["tensors"].size() == 5 + hf.tensors().size());
}

TEST_CASE("check: a mismatch ends 5 and names tensor and coordinate") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_5_text"}.write(folder / "c");
  test::write_reference(folder / "c", [](const std::string& name, std::vector<float>& values) {
    if (name == "logits") values[static_cast<size_t>(HfFolder::kVocab) * 2 + 7] += 1; // batch 0, token 2, word 7
  });
  const Result r = check(folder / "c", {"--stack", "megatron"});
  CHECK(r.status == 5);
  CHECK(has(r.out, "MISMATCH"));
  CHECK(has(r.out, "First mismatch: logits at [0, 2, 7]"));
  CHECK(has(r.err, "logits at [0, 2, 7]"));
}

TEST_CASE("check: what cannot be read ends 1, wrong usage 2") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_5_text"}.write(folder / "c");
  const Result without = check(folder / "c", {"--export-hf", (folder / "copy").string()}); // nothing to compare with
  CHECK_MESSAGE(without.status == 0, without.err);
  CHECK(has(without.out, "reference.safetensors is not there, so nothing was compared"));
  CHECK(has(without.out, "on 64 tokens drawn from seed 1"));
  CHECK(has(without.err, "byte for byte"));
  CHECK(test::read_bytes(folder / "copy" / "model.safetensors") == test::read_bytes(folder / "c" / "model.safetensors"));
  CHECK(check(folder / "c", {"--export-hf", (folder / "copy").string()}).status == 1); // is there already
  test::write_reference(folder / "c");
  std::string bytes = test::read_bytes(folder / "c" / "model.safetensors");
  CHECK(check(folder / "c", {"--dtype", "fp8"}).status == 2);
  CHECK(check(folder / "c", {"--modules", "gdn_nrom_out"}).status == 2);
  CHECK(check(folder / "none").status == 2); // no such model
  test::write_bytes(folder / "c" / "model.safetensors", bytes.substr(0, bytes.size() - 1));
  const Result truncated = check(folder / "c");
  CHECK(truncated.status == 1);
  CHECK(has(truncated.err, "truncated"));
  CHECK(truncated.out.empty());
}

namespace {

// A configuration of the model in `folder`/c, and one step of a run on it.
Result train(const TemporaryFolder& folder, std::vector<std::string> more) {
  const config::Model model = config::Profiles().model((folder / "c").string()).model;
  test::write_bytes(folder / "tiny.yaml", config::to_yaml(config::to_node(model)) +
                                              "run: {seq_length: 16, micro_batch_size: 1, global_batch_size: 1, stack: native}\n"
                                              "train: {steps: 1, lr: 0}\n");
  std::vector<std::string> arguments{std::getenv("GDNTRAIN"), "run", (folder / "tiny.yaml").string(), "--device", "cpu",
                                     "-o", (folder / "log").string()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return test::run(arguments);
}

std::string weights(const std::filesystem::path& folder) { return test::read_bytes(folder / "model.safetensors"); }

} // namespace

TEST_CASE("run: weights come from a checkpoint and go back to one") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_5_moe_text"}.write(folder / "c");
  const std::string from = (folder / "c").string();
  const Result still = train(folder, {"--hf", from, "--export-hf", (folder / "still").string()});
  CHECK_MESSAGE(still.status == 0, still.err);
  CHECK(weights(folder / "still") == weights(folder / "c")); // a learning rate of 0
  CHECK(test::read_bytes(folder / "still" / "config.json") == test::read_bytes(folder / "c" / "config.json"));

  const Result moved = train(folder, {"--hf", from, "--export-hf", (folder / "moved").string(), "--set", "train.lr=0.1"});
  CHECK(moved.status == 0);
  CHECK(weights(folder / "moved").size() == weights(folder / "c").size());
  CHECK(weights(folder / "moved") != weights(folder / "c"));

  // Without a checkpoint to follow: one of its own, which can be read again.
  const Result fresh = train(folder, {"--export-hf", (folder / "fresh").string()});
  CHECK(fresh.status == 0);
  const Result again = train(folder, {"--hf", (folder / "fresh").string(), "--export-hf", (folder / "again").string()});
  CHECK_MESSAGE(again.status == 0, again.err);
  CHECK(weights(folder / "again") == weights(folder / "fresh"));
}

TEST_CASE("run: a checkpoint of another model, and an export that is there, cost nothing but a message") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_next"}.write(folder / "c");
  const std::string from = (folder / "c").string();
  const Result there = train(folder, {"--hf", from, "--export-hf", from});
  CHECK(there.status == 1);
  CHECK(has(there.err, "is there already"));
  const Result other = train(folder, {"--hf", from, "--set", "rope_theta=5000"});
  CHECK(other.status == 1);
  CHECK(has(other.err, "rope_theta is 1"));
  CHECK(has(other.err, "has 5000"));
  const Result wider = train(folder, {"--hf", from, "--set", "moe_intermediate_size=16"});
  CHECK(wider.status == 1);
  CHECK(has(wider.err, "gate_up_proj': shape [3, 16, 8], the model has [3, 32, 8]"));
  CHECK_FALSE(std::filesystem::exists(folder / "c.part"));
}
