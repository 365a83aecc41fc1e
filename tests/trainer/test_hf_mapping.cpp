#include <doctest/doctest.h>

#include <cstring>
#include <set>

#include <fmt/core.h>

#include "config/profiles.h"
#include "core/error.h"
#include "tests/trainer/hf_folder.h"
#include "trainer/hf/checkpoint.h"

// The values of a folder written by hand must arrive at the rows that the parameter table names.
// The expected places are written out here, per head and per channel, from the layouts' descriptions.
using namespace gdn;
using namespace gdn::trainer;
using test::HfFolder;
using test::TemporaryFolder;

namespace {

struct Loaded {
  TemporaryFolder folder;
  HfFolder hf;
  config::Model model;
  model::ParameterTable table;
  hf::Checkpoint checkpoint;

  explicit Loaded(const HfFolder& what)
      : hf((what.write(folder / "c"), what)), model(config::Profiles().model((folder / "c").string()).model),
        table(table_of(model)), checkpoint(folder / "c", model, table) {}

  static model::ParameterTable table_of(const config::Model& m) {
    config::Run run; // no vision tower, vocabulary padded to 128
    run.train_mtp = m.mtp_layers > 0;
    run.vision = config::VisionMode::Absent;
    return model::parameter_table(m, run);
  }
  std::vector<float> read(const char* parameter) const { return checkpoint.read(table.at(parameter)); }
  // Row `row` of an HF tensor with rows of HfFolder::kHidden.
  std::vector<float> row(const std::string& tensor, std::int64_t row) const {
    std::vector<float> values;
    for (int c = 0; c < HfFolder::kHidden; ++c) values.push_back(hf.value(tensor, row * HfFolder::kHidden + c));
    return values;
  }
};

std::vector<float> row_of(const std::vector<float>& values, std::int64_t row) {
  const auto first = values.begin() + row * HfFolder::kHidden;
  return {first, first + HfFolder::kHidden};
}

constexpr int kR = HfFolder::kValueHeads / HfFolder::kKeyHeads;
constexpr int dk = HfFolder::kKeyDim, dv = HfFolder::kValueDim, nk = HfFolder::kKeyHeads, nv = HfFolder::kValueHeads;

} // namespace

TEST_CASE("hf: Qwen3-Next interleaves q, k, v, z per key head, and b, a") {
  const Loaded l({.type = "qwen3_next"});
  const std::vector<float> w = l.read("layers.0.gdn.in_proj");
  const std::string qkvz = "model.layers.0.linear_attn.in_proj_qkvz.weight", ba = "model.layers.0.linear_attn.in_proj_ba.weight";
  const int group = 2 * dk + 2 * kR * dv; // rows of one key head in in_proj_qkvz
  for (int head = 0; head < nk; ++head)
    for (int i = 0; i < dk; ++i) {
      CHECK(row_of(w, head * dk + i) == l.row(qkvz, head * group + i));                    // q
      CHECK(row_of(w, nk * dk + head * dk + i) == l.row(qkvz, head * group + dk + i));     // k
    }
  const int v0 = 2 * nk * dk, z0 = v0 + nv * dv, b0 = z0 + nv * dv, a0 = b0 + nv;
  for (int head = 0; head < nv; ++head) {
    const int key_head = head / kR, inside = head % kR;
    for (int i = 0; i < dv; ++i) {
      CHECK(row_of(w, v0 + head * dv + i) == l.row(qkvz, key_head * group + 2 * dk + inside * dv + i));
      CHECK(row_of(w, z0 + head * dv + i) == l.row(qkvz, key_head * group + 2 * dk + kR * dv + inside * dv + i));
    }
    CHECK(row_of(w, b0 + head) == l.row(ba, key_head * 2 * kR + inside));
    CHECK(row_of(w, a0 + head) == l.row(ba, key_head * 2 * kR + kR + inside));
  }
  CHECK(w.size() == static_cast<size_t>((a0 + nv) * HfFolder::kHidden));
}

TEST_CASE("hf: Qwen3.5 keeps q|k|v, z, b and a apart") {
  const Loaded l({.type = "qwen3_5_text"});
  const std::vector<float> w = l.read("layers.0.gdn.in_proj");
  const std::string at = "model.layers.0.linear_attn.";
  int row = 0;
  for (auto [name, rows] : {std::pair{"in_proj_qkv", 2 * nk * dk + nv * dv}, {"in_proj_z", nv * dv}, {"in_proj_b", nv}, {"in_proj_a", nv}})
    for (int i = 0; i < rows; ++i) CHECK(row_of(w, row++) == l.row(at + name + ".weight", i));
}

TEST_CASE("hf: q_proj holds query and gate per head, linear_qkv holds query groups") {
  const Loaded l({.type = "qwen3_5_text"});
  const std::vector<float> w = l.read("layers.1.attention.linear_qkv");
  const std::string at = "model.layers.1.self_attn.";
  const int d = HfFolder::kHeadDim, per_group = HfFolder::kHeads / HfFolder::kKvHeads;
  int row = 0;
  for (int g = 0; g < HfFolder::kKvHeads; ++g) {
    for (int part = 0; part < 2; ++part) // queries of the group, then their gates
      for (int h = 0; h < per_group; ++h)
        for (int i = 0; i < d; ++i)
          CHECK(row_of(w, row++) == l.row(at + "q_proj.weight", (g * per_group + h) * 2 * d + part * d + i));
    for (int i = 0; i < d; ++i) CHECK(row_of(w, row++) == l.row(at + "k_proj.weight", g * d + i));
    for (int i = 0; i < d; ++i) CHECK(row_of(w, row++) == l.row(at + "v_proj.weight", g * d + i));
  }
  CHECK(w.size() == static_cast<size_t>(row * HfFolder::kHidden));
}

TEST_CASE("hf: experts, fused or one by one, are the same parameters") {
  const Loaded fused({.type = "qwen3_5_moe_text"}), each({.type = "qwen3_5_moe_text", .per_expert = true});
  const int f = HfFolder::kExpertFfn, h = HfFolder::kHidden;
  const std::vector<float> a = fused.read("layers.0.moe.experts.fc1"), b = each.read("layers.0.moe.experts.fc1");
  for (int e = 0; e < HfFolder::kExperts; ++e) {
    const std::string at = fmt::format("model.layers.0.mlp.experts.{}.", e);
    for (int i = 0; i < f; ++i) {
      CHECK(row_of(a, e * 2 * f + i) == fused.row("model.layers.0.mlp.experts.gate_up_proj", e * 2 * f + i));
      CHECK(row_of(b, e * 2 * f + i) == each.row(at + "gate_proj.weight", i));
      CHECK(row_of(b, e * 2 * f + f + i) == each.row(at + "up_proj.weight", i));
    }
    const std::vector<float> down = each.read("layers.0.moe.experts.fc2");
    for (int i = 0; i < h * f; ++i) CHECK(down[static_cast<size_t>(e * h * f + i)] == each.hf.value(at + "down_proj.weight", i));
  }
  CHECK(row_of(fused.read("layers.0.moe.shared.fc1"), HfFolder::kFfn) == fused.row("model.layers.0.mlp.shared_expert.up_proj.weight", 0));
}

TEST_CASE("hf: tensors that keep their shape, MTP, prefixes, padding, ties") {
  const Loaded l({.type = "qwen3_5_moe_text", .vision = true, .mtp = true, .tied = true, .stored_head = true, .mtp_per_expert = true, .sharded = true});
  auto same = [&](const char* parameter, const std::string& tensor) {
    CAPTURE(parameter);
    const std::vector<float> values = l.read(parameter);
    std::vector<float> expected;
    for (size_t i = 0; i < values.size(); ++i) expected.push_back(l.hf.value(tensor, static_cast<std::int64_t>(i)));
    CHECK(values == expected);
  };
  const std::string at = "model.language_model.layers.";
  same("layers.0.input_norm", at + "0.input_layernorm.weight");
  same("layers.0.mlp_norm", at + "0.post_attention_layernorm.weight");
  same("layers.0.gdn.conv1d", at + "0.linear_attn.conv1d.weight");
  same("layers.0.gdn.A_log", at + "0.linear_attn.A_log");
  same("layers.0.gdn.dt_bias", at + "0.linear_attn.dt_bias");
  same("layers.0.gdn.out_norm", at + "0.linear_attn.norm.weight");
  same("layers.0.gdn.out_proj", at + "0.linear_attn.out_proj.weight");
  same("layers.1.attention.q_norm", at + "1.self_attn.q_norm.weight");
  same("layers.1.attention.k_norm", at + "1.self_attn.k_norm.weight");
  same("layers.1.attention.linear_proj", at + "1.self_attn.o_proj.weight");
  same("layers.1.moe.router", at + "1.mlp.gate.weight");
  same("layers.1.moe.shared.fc2", at + "1.mlp.shared_expert.down_proj.weight");
  same("layers.1.moe.shared.gate", at + "1.mlp.shared_expert_gate.weight");
  same("final_norm", "model.language_model.norm.weight");
  same("mtp.0.enorm", "mtp.pre_fc_norm_embedding.weight");
  same("mtp.0.hnorm", "mtp.pre_fc_norm_hidden.weight");
  same("mtp.0.eh_proj", "mtp.fc.weight");
  same("mtp.0.final_norm", "mtp.norm.weight");
  same("mtp.0.layer.input_norm", "mtp.layers.0.input_layernorm.weight");
  CHECK(l.read("mtp.0.layer.moe.experts.fc2")[5] == l.hf.value("mtp.layers.0.mlp.experts.0.down_proj.weight", 5));

  const std::vector<float> words = l.read("embedding.word"); // 12 rows of 128
  REQUIRE(words.size() == 128u * HfFolder::kHidden);
  CHECK(row_of(words, 11) == l.row("model.language_model.embed_tokens.weight", 11));
  CHECK(row_of(words, 12) == std::vector<float>(HfFolder::kHidden, 0));
  CHECK(l.checkpoint.not_read() == std::vector<std::string>{"model.visual.patch_embed.proj.weight", "model.visual.blocks.0.norm1.bias"});

  // Part of a parameter, in the dtype of the file.
  std::vector<std::uint16_t> bits(3);
  l.checkpoint.read(l.table.at("layers.0.gdn.in_proj"), 9, 3, DType::BF16, std::as_writable_bytes(std::span(bits)).data());
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits[static_cast<size_t>(i)]) << 16;
    float x = 0;
    std::memcpy(&x, &wide, 4);
    CHECK(x == l.hf.value(at + "0.linear_attn.in_proj_qkv.weight", 9 + i));
  }
}

TEST_CASE("hf: MTP weights are left alone when MTP is not trained") {
  TemporaryFolder folder;
  const HfFolder with_mtp{.type = "qwen3_next", .mtp = true};
  with_mtp.write(folder / "c");
  HfFolder silent = with_mtp; // Qwen3-Next's own config.json does not mention its MTP layer
  silent.mtp = false;
  test::write_bytes(folder / "c" / "config.json", silent.config());
  const config::Model model = config::Profiles().model((folder / "c").string()).model;
  const model::ParameterTable table = Loaded::table_of(model);
  const hf::Checkpoint checkpoint(folder / "c", model, table);
  CHECK(checkpoint.not_read().size() == with_mtp.tensors().size() - silent.tensors().size());
}

TEST_CASE("hf: what does not fit the configuration is refused by name") {
  TemporaryFolder folder;
  const HfFolder hf{.type = "qwen3_5_moe_text", .tied = true, .stored_head = true, .sharded = true};
  auto refusal = [&](const std::vector<HfFolder::Named>& list) -> std::string {
    std::filesystem::remove_all(folder / "c");
    hf.write(folder / "c", list);
    const config::Model model = config::Profiles().model((folder / "c").string()).model;
    const model::ParameterTable table = Loaded::table_of(model);
    try {
      hf::Checkpoint(folder / "c", model, table);
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::Checkpoint);
      return e.what();
    }
    return "accepted";
  };
  auto check = [](const std::string& message, std::initializer_list<const char*> words) {
    CAPTURE(message);
    for (const char* w : words) CHECK(message.find(w) != std::string::npos);
  };
  std::vector<HfFolder::Named> list = hf.tensors();
  auto at = [&](const std::string& end) {
    for (HfFolder::Named& n : list)
      if (n.name.ends_with(end)) return &n;
    FAIL(end);
    return &list[0];
  };
  REQUIRE(refusal(list) == "accepted");

  SUBCASE("missing") {
    list.erase(list.begin() + (at("0.linear_attn.in_proj_z.weight") - list.data()));
    check(refusal(list), {"1 missing (model.layers.0.linear_attn.in_proj_z.weight)", "qwen3_5_moe_text"});
  }
  SUBCASE("many missing: the first few are named") {
    list.erase(list.begin(), list.begin() + 8);
    check(refusal(list), {"8 missing (model.embed_tokens.weight, model.layers.0.input_layernorm.weight, ", " and 3 more)"});
  }
  SUBCASE("unknown") {
    list.push_back({"model.layers.1.self_attn.q_proj.bias", {4}});
    check(refusal(list), {"1 unknown (model.layers.1.self_attn.q_proj.bias)"});
  }
  SUBCASE("shape") {
    at("1.self_attn.q_proj.weight")->shape = {16, 8};
    check(refusal(list), {"model-0000", "q_proj.weight'", "[16, 8]", "[64, 8]"});
  }
  SUBCASE("a tied head that differs") {
    at("lm_head.weight")->name = "x";
    HfFolder untied = hf;
    list.back().name = "lm_head.weight";
    untied.tied = false; // other values
    std::filesystem::remove_all(folder / "c");
    untied.write(folder / "c", list);
    test::write_bytes(folder / "c" / "config.json", hf.config());
    const config::Model model = config::Profiles().model((folder / "c").string()).model;
    const model::ParameterTable table = Loaded::table_of(model);
    CHECK_THROWS_WITH_AS(hf::Checkpoint(folder / "c", model, table), doctest::Contains("tied to"), Error);
  }
  SUBCASE("another architecture") {
    std::string config = test::read_bytes(folder / "c" / "config.json");
    const config::Model model = config::Profiles().model((folder / "c").string()).model;
    const model::ParameterTable table = Loaded::table_of(model);
    test::write_bytes(folder / "c" / "config.json", R"({"model_type": "llama"})");
    CHECK_THROWS_WITH_AS(hf::Checkpoint(folder / "c", model, table), doctest::Contains("'llama'"), Error);
  }
}

TEST_CASE("hf: index and files must agree") {
  TemporaryFolder folder;
  const std::filesystem::path c = folder / "c", index = c / "model.safetensors.index.json";
  HfFolder{.sharded = true}.write(c);
  const std::string good = test::read_bytes(index);
  auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  auto refuses = [&](const std::string& text, const char* what) {
    test::write_bytes(index, text);
    CHECK_THROWS_WITH_AS(hf::WeightFiles{c}, doctest::Contains(what), Error);
  };
  CHECK(hf::WeightFiles(c).files().size() == 2);
  refuses("", "not an index");
  refuses("[]", "weight_map");
  refuses(std::string(100000, '['), "nested deeper");
  refuses(R"({"weight_map": {"a": 1}})", "'a'");
  refuses(R"({"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}})", "'a' appears twice");
  refuses(R"({"weight_map": {"a": "../x.safetensors"}})", "plain name");
  refuses(R"({"weight_map": {"a": "x.bin"}})", "plain name");
  refuses(replaced("\"lm_head.weight\"", "\"head\""), "'lm_head.weight' is not in");
  refuses(replaced("00001-of-00002", "00002-of-00002"), "should be in model-00002-of-00002");
  refuses(replaced("00001-of-00002", "00007-of-00002"), "no such file");
  refuses(replaced("\"weight_map\": {", "\"weight_map\": {\"more\": \"model-00001-of-00002.safetensors\","), "lacks tensor 'more'");
  std::filesystem::remove(index);
  CHECK_THROWS_WITH_AS(hf::WeightFiles{c}, doctest::Contains("holds neither"), Error);
  CHECK_THROWS_WITH_AS(hf::WeightFiles{folder / "none"}, doctest::Contains("no such folder"), Error);
}
