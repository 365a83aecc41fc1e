#include <doctest/doctest.h>

#include <limits>
#include <map>

#include "config/model_io.h"
#include "config/profiles.h"
#include "config/yaml.h"
#include "core/error.h"
#include "tests/trainer/hf_folder.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/config_json.h"
#include "trainer/hf/convert.h"
#include "trainer/hf/export.h"

using namespace gdn;
using namespace gdn::trainer;
using test::HfFolder;
using test::TemporaryFolder;

namespace {

std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& e : std::filesystem::directory_iterator(folder)) files[e.path().filename()] = test::read_bytes(e.path());
  return files;
}

config::Model model_of(const std::filesystem::path& folder) { return config::Profiles().model(folder.string()).model; }

model::ParameterTable table_of(const config::Model& m) {
  config::Run run;
  run.train_mtp = m.mtp_layers > 0;
  run.vision = config::VisionMode::Absent;
  return model::parameter_table(m, run);
}

} // namespace

TEST_CASE("hf: loading and exporting gives every file again, byte for byte") {
  const HfFolder variants[] = {
      {.type = "qwen3_next"},
      {.type = "qwen3_next", .mtp = true, .per_expert = true, .mtp_per_expert = true, .sharded = true},
      {.type = "qwen3_5_text", .tied = true},
      {.type = "qwen3_5_text", .vision = true, .tied = true, .stored_head = true, .dtype = DType::FP32},
      {.type = "qwen3_5_moe_text", .vision = true, .mtp = true, .mtp_per_expert = true, .sharded = true},
      {.type = "qwen3_5_moe_text", .mtp = true, .per_expert = true, .dtype = DType::FP32}};
  for (const HfFolder& hf : variants) {
    CAPTURE(hf.type);
    TemporaryFolder folder;
    hf.write(folder / "in");
    const config::Model model = model_of(folder / "in");
    const model::ParameterTable table = table_of(model);
    const hf::Checkpoint checkpoint(folder / "in", model, table);
    hf::Export out(folder / "out", checkpoint);
    for (const model::Parameter& p : table.parameters) out.put(p, checkpoint.read(p));
    CHECK_FALSE(std::filesystem::exists(folder / "out"));
    out.commit();
    CHECK(contents(folder / "out") == contents(folder / "in"));
    CHECK_FALSE(std::filesystem::exists(folder / "out.part"));
  }
}

TEST_CASE("hf: a changed parameter changes its tensor and nothing else") {
  TemporaryFolder folder;
  HfFolder{.type = "qwen3_next"}.write(folder / "in");
  const config::Model model = model_of(folder / "in");
  const model::ParameterTable table = table_of(model);
  const hf::Checkpoint checkpoint(folder / "in", model, table);
  hf::Export out(folder / "out", checkpoint);
  const std::int64_t h = HfFolder::kHidden;
  for (const model::Parameter& p : table.parameters) {
    std::vector<float> values = checkpoint.read(p);
    // The second alpha head of key head 1: alpha rows follow q, k, v, z and beta.
    const std::int64_t row = p.shape[0] - HfFolder::kValueHeads + 4;
    if (p.local == "gdn.in_proj") values[static_cast<size_t>(row * h)] = 64;
    out.put(p, 0, 3, DType::FP32, std::as_bytes(std::span(values)).data()); // in two parts
    out.put(p, 3, p.elements() - 3, DType::FP32, std::as_bytes(std::span(values)).data() + 12);
  }
  out.commit();
  const SafetensorsFile a(folder / "in" / "model.safetensors"), b(folder / "out" / "model.safetensors");
  int changed = 0;
  for (const TensorInfo& t : a.tensors()) {
    const auto x = a.data(t), y = b.data(b.at(t.name));
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i]) continue;
      ++changed;
      CHECK(t.name == "model.layers.0.linear_attn.in_proj_ba.weight");
      CHECK(static_cast<std::int64_t>(i) / (2 * h) == 10); // key head 1: b 6..8, a 9..11
    }
  }
  CHECK(changed > 0);
}

TEST_CASE("hf: a model of its own becomes a checkpoint that reads back the same") {
  for (const char* type : {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}) {
    for (DType dtype : {DType::FP32, DType::BF16}) {
      CAPTURE(type);
      TemporaryFolder folder;
      HfFolder{.type = type, .mtp = true, .tied = true}.write(folder / "in");
      const config::Model model = model_of(folder / "in");
      const model::ParameterTable table = table_of(model);
      const hf::Checkpoint checkpoint(folder / "in", model, table);
      {
        hf::Export out(folder / "out", model, table, {.model_type = type, .dtype = dtype, .max_file_bytes = 3000});
        for (const model::Parameter& p : table.parameters) out.put(p, checkpoint.read(p));
        out.commit();
      }
      const hf::WeightFiles files(folder / "out");
      CHECK(files.has_index());
      CHECK(files.files().size() > 1);
      for (const SafetensorsFile& file : files.files()) { // data only, without the header
        Bytes bytes = 0;
        for (const TensorInfo& t : file.tensors()) bytes += t.bytes();
        CHECK(bytes <= 3000);
      }
      config::Model again = model_of(folder / "out");
      again.name = model.name; // both are named after their folder
      CHECK(config::to_yaml(config::to_node(again)) == config::to_yaml(config::to_node(model)));
      const hf::Checkpoint read(folder / "out", again, table);
      for (const model::Parameter& p : table.parameters) CHECK(read.read(p) == checkpoint.read(p));
    }
  }
}

TEST_CASE("hf: an export is whole or not there") {
  TemporaryFolder folder;
  HfFolder{}.write(folder / "in");
  const config::Model model = model_of(folder / "in");
  const model::ParameterTable table = table_of(model);
  const hf::Checkpoint checkpoint(folder / "in", model, table);
  {
    hf::Export out(folder / "out", checkpoint);
    CHECK_THROWS_WITH_AS(hf::Export(folder / "out", checkpoint), doctest::Contains("out.part: is there already"), Error);
    CHECK_THROWS_WITH_AS(out.commit(), doctest::Contains("were never written"), Error);
  }
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
  CHECK_FALSE(std::filesystem::exists(folder / "out.part"));
  CHECK_THROWS_WITH_AS(hf::Export(folder / "in", checkpoint), doctest::Contains("new folder"), Error);
  const hf::Checkpoint still_whole(folder / "in", model, table);
}

TEST_CASE("hf: what an architecture cannot say is refused by name") {
  TemporaryFolder folder;
  HfFolder{}.write(folder / "in");
  const config::Model good = model_of(folder / "in");
  auto refuses = [&](const char* type, const char* what, auto change) {
    config::Model m = good;
    change(m);
    CHECK_THROWS_WITH_AS(hf::config_json(m, type, DType::BF16), doctest::Contains(what), Error);
  };
  CHECK_NOTHROW(hf::config_json(good, "qwen3_5_moe_text", DType::BF16));
  CHECK_NOTHROW(hf::config_json(good, "qwen3_next", DType::BF16));
  refuses("qwen3_5_text", "MoE", [](config::Model&) {});
  refuses("qwen3_5", "known are", [](config::Model&) {});
  refuses("qwen3_next", "gdn2", [](config::Model& m) { m.mixers[0] = config::LayerKind::Gdn2; });
  refuses("qwen3_next", "zero-centred", [](config::Model& m) { m.zero_centred_norm = false; });
  refuses("qwen3_next", "bias", [](config::Model& m) { m.gdn.conv_bias = true; });
  refuses("qwen3_next", "softmax", [](config::Model& m) { m.moe.score = "sigmoid"; });
  refuses("qwen3_5_moe_text", "renormalise", [](config::Model& m) { m.moe.renormalise = false; });
  refuses("qwen3_next", "MTP", [](config::Model& m) { m.mtp_layers = 2; });
}

TEST_CASE("hf: conversions between FP32 and BF16") {
  auto narrowed = [](float x) {
    std::uint16_t bits = 0;
    hf::convert(DType::FP32, std::as_bytes(std::span(&x, 1)).data(), DType::BF16, std::as_writable_bytes(std::span(&bits, 1)).data(), 1);
    return bits;
  };
  CHECK(narrowed(1.0f) == 0x3f80);
  CHECK(narrowed(1.00390625f) == 0x3f80);  // 1 + 2^-8: a tie, to even
  CHECK(narrowed(1.01171875f) == 0x3f82);  // 1 + 3 * 2^-8: a tie, to even
  CHECK(narrowed(1.005f) == 0x3f81);
  CHECK(narrowed(3.4e38f) == 0x7f80);      // rounds to infinity
  CHECK(narrowed(-0.0f) == 0x8000);
  CHECK((narrowed(std::numeric_limits<float>::quiet_NaN()) & 0x7fff) > 0x7f80);
  CHECK((narrowed(std::bit_cast<float>(0x7f800001u)) & 0x7fff) > 0x7f80); // payload below bit 16
  int changed = 0;
  for (std::uint32_t i = 0; i < 0x10000; ++i) { // BF16 -> FP32 -> BF16, every value
    const auto bits = static_cast<std::uint16_t>(i);
    std::uint32_t wide = 0;
    std::uint16_t back = 0;
    hf::convert(DType::BF16, std::as_bytes(std::span(&bits, 1)).data(), DType::FP32, std::as_writable_bytes(std::span(&wide, 1)).data(), 1);
    hf::convert(DType::FP32, std::as_bytes(std::span(&wide, 1)).data(), DType::BF16, std::as_writable_bytes(std::span(&back, 1)).data(), 1);
    changed += bits != back;
  }
  CHECK(changed == 0);
  CHECK_THROWS_AS(hf::convert(DType::FP16, nullptr, DType::FP32, nullptr, 0), Error);
}
