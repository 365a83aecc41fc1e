#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include <doctest/doctest.h>

#include "config/embedded.h"
#include "config/hardware_io.h"
#include "config/model_io.h"
#include "config/packed.h"
#include "config/profiles.h"
#include "config/run_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "model/parameters.h"
#include "tests/temporary_folder.h"
#include "tests/unit/refused.h"

using namespace gdn;
using namespace gdn::config;
using namespace gdn::test;

namespace {

const Profiles& builtin() {
  static const Profiles p;
  return p;
}

} // namespace

// Totals of the models' Hugging Face pages; the last four are arithmetic over their configurations.
TEST_CASE("every model profile reproduces its parameter counts") {
  struct Row {
    const char* name;
    std::int64_t text, vision, mtp, total;
  };
  const Row rows[] = {{"qwen3-next-80b-a3b", 79674391296, 0, 1650471424, 81324862720},
                      {"qwen3-coder-next", 79674391296, 0, 0, 79674391296},
                      {"qwen3.8-2.4t-a95b", 2419804697984, 0, 26378027520, 2446182725504},
                      {"qwen3.5-397b-a17b", 396346350336, 456010480, 6595568128, 403397928944},
                      {"qwen3.5-122b-a10b", 122111526912, 451290864, 2523679232, 125086497008},
                      {"qwen3.5-35b-a3b", 34660610688, 446571248, 844640768, 35951822704},
                      {"qwen3.6-35b-a3b", 34660610688, 446571248, 844640768, 35951822704},
                      {"qwen3.5-27b", 26895998464, 460730096, 424699392, 27781427952},
                      {"qwen3.6-27b", 26895998464, 460730096, 424699392, 27781427952},
                      {"qwen3.8-27b", 26895998464, 460730096, 424699392, 27781427952},
                      {"qwen3.5-9b", 8953803264, 456010480, 243290624, 9653104368},
                      {"qwen3.5-4b", 4205751296, 333514240, 120599552, 4659865088},
                      {"qwen3.5-2b", 1881825088, 331416576, 60828160, 2274069824},
                      {"qwen3.5-0.8b", 752393024, 100592896, 20452864, 873438784},
                      {"olmo-hybrid-7b", 7430870688, 0, 0, 7430870688},
                      {"kimi-linear-48b-a3b", 49122681728, 0, 0, 49122681728},
                      {"llama3-70b", 70553706496, 0, 0, 70553706496},
                      {"jet-nemotron-2b", 1964806208, 0, 0, 1964806208},
                      {"jet-nemotron-4b", 3960424768, 0, 0, 3960424768},
                      {"fla-gdn-1.3b", 1387348732, 0, 0, 1387348732},
                      {"fla-gdn-340m", 512272124, 0, 0, 512272124}};
  for (const Row& r : rows) {
    INFO(r.name);
    Model m = builtin().model(r.name).model;
    model::ParameterTotals t = model::totals(model::parameter_table(m));
    CHECK(t.text == r.text);
    CHECK(t.vision == r.vision);
    CHECK(t.mtp == r.mtp);
    CHECK(t.sum() == r.total);
    CHECK(m.published_text == r.text);
    CHECK(m.published_vision == r.vision);
    CHECK(m.published_mtp == r.mtp);
    CHECK(m.published_total == r.total);
    CHECK(!m.parameters_source.empty());
  }
}

TEST_CASE("every built-in profile reads, says its sources, and survives being written") {
  CHECK(builtin().models().size() == 20);
  CHECK(builtin().hardwares().size() == 13);
  for (const Profiles::Listed& l : builtin().models()) {
    INFO(l.name);
    ModelProfile p = builtin().model(l.name);
    CHECK(!p.model.source.empty());
    CHECK((p.run.source.starts_with("published: ") || p.run.source.starts_with("ours: ")));
    CHECK(builtin().hardware(p.hardware).name == p.hardware);
    // The default run divides: ranks, experts and batches (models.md 7.1).
    const Parallel& q = p.run.parallel;
    CHECK(q.gpus % (q.tp * q.cp * q.pp) == 0);
    CHECK(q.gpus % (q.pp * q.ep * q.etp) == 0);
    CHECK(p.run.global_batch % (p.run.micro_batch * q.dp()) == 0);
    if (p.model.moe.experts > 0) CHECK(p.model.moe.experts % q.ep == 0);
    CHECK(p.model.layers() % (q.pp * q.vp) == 0);
    Node written = to_node(p);
    CHECK(to_yaml(to_node(read_model_profile(parse_yaml(to_yaml(written), "again")))) == to_yaml(written));
  }
  for (const Profiles::Listed& l : builtin().hardwares()) {
    INFO(l.name);
    Hardware h = builtin().hardware(l.name);
    CHECK(h.allocator_reserve == 0.04);
    CHECK(h.reserve_of("upstream").size() == 6);
    CHECK(h.reserve_of("own").size() == 6); // on h200 with its own context
    CHECK(h.achieved_bandwidth <= h.bandwidth);
    CHECK(!h.efficiencies.empty());
    CHECK(!h.collectives.empty());
    Hardware again = read_hardware(parse_yaml(to_yaml(to_node(h)), "again"));
    CHECK(to_yaml(to_node(again)) == to_yaml(to_node(h)));
    CHECK(again.bf16 == h.bf16);
  }
}

TEST_CASE("default runs of the two reference models") {
  ModelProfile p = builtin().model("qwen3.5-35b-a3b");
  CHECK(p.hardware == "h200");
  CHECK(p.run.parallel.gpus == 8);
  CHECK(p.run.parallel.ep == 8);
  p = builtin().model("qwen3.5-397b-a17b");
  CHECK(p.run.parallel.gpus == 128);
  CHECK(p.run.parallel.tp == 2);
  CHECK(p.run.parallel.sequence_parallel);
  CHECK(p.run.parallel.pp == 4);
  CHECK(p.run.parallel.ep == 32);
  CHECK(p.run.seq == 4096);
  CHECK(p.run.micro_batch == 1);
  CHECK(p.run.global_batch == 1024);
  CHECK(p.run.parallel.dp() == 16);
}

TEST_CASE("model profiles beyond their counts") {
  Model m = builtin().model("kimi-linear").model;
  CHECK(m.parameters_only);
  CHECK(m.unmodelled_kind == "KDA");
  CHECK(std::count(m.mixers.begin(), m.mixers.end(), LayerKind::Unmodelled) == 20);
  CHECK(m.mlps[0] == MlpKind::Dense);
  CHECK(m.mlps[1] == MlpKind::Moe);
  m = builtin().model("olmo-hybrid-7b").model;
  CHECK(m.gdn.negative_eigenvalues);
  CHECK(m.gdn.value_head_dim == 192);
  CHECK(m.attention.whole_vector_qk_norm);
  m = builtin().model("fla-gdn-340m").model;
  CHECK(std::count(m.mixers.begin(), m.mixers.end(), LayerKind::Gdn) == 21);
  m = builtin().model("dense").model; // 48 layers of width 1600, attention and MLP only
  CHECK(m.layers() == 48);
  CHECK(m.hidden == 1600);
  CHECK(std::count(m.mixers.begin(), m.mixers.end(), LayerKind::Attention) == 48);
  m = builtin().model("tiny").model;
  CHECK(m.mixers == std::vector<LayerKind>{LayerKind::Gdn, LayerKind::Gdn, LayerKind::Gdn, LayerKind::Attention});
  CHECK(m.mlps == std::vector<MlpKind>(4, MlpKind::Moe));
}

// Lowest CUDA totals seen, dense bf16 peaks and nominal bandwidths; L40S by the rule for a card
// without a reported total: nvidia-smi's 46,068 MiB minus 0.45 GiB.
TEST_CASE("hardware profiles hold dense peaks and what CUDA reports") {
  struct Row {
    const char* name;
    std::int64_t mib;
    double tflops, tbps;
  };
  const Row rows[] = {{"a100-40", 40325, 312, 1.555}, {"a100-80", 81049, 312, 2.039}, {"h100", 81008, 989, 3.35},
                      {"h200", 143155, 989, 4.8},     {"h20", 97280, 148, 4.0},       {"b200", 182630, 2250, 8.0},
                      {"gb200", 188733, 2500, 8.0},   {"b300", 274114, 2250, 8.0},    {"gb300", 283136, 2500, 8.0},
                      {"rtx-pro-6000", 97249, 468, 1.792}, {"rtx-5090", 32092, 209.5, 1.792},
                      {"rtx-4090", 24074, 165.2, 1.008},   {"l40s", 46068 - 461, 362, 0.864}};
  for (const Row& r : rows) {
    INFO(r.name);
    Hardware h = builtin().hardware(r.name);
    CHECK(h.memory == r.mib * kMiB);
    CHECK(h.bf16 == doctest::Approx(r.tflops * 1e12).epsilon(1e-12));
    CHECK(h.bandwidth == doctest::Approx(r.tbps * 1e12).epsilon(1e-12));
  }
  Hardware h200 = builtin().hardware("h200");
  CHECK(h200.device_name == "NVIDIA H200");
  CHECK(h200.achieved_bandwidth == doctest::Approx(4.2e12));
  CHECK(h200.scale_up == doctest::Approx(450e9));
  auto share = [&](const char* family, const char* pass, double size) {
    for (const EfficiencyRow& e : h200.efficiencies)
      if (e.family == family && e.pass == pass && e.size.value_or(0) == size) return e.value;
    return 0.0;
  };
  CHECK(share("gemm", "any", 0) == 0.78);
  CHECK(share("attention", "forward", 0) == 0.65);
  CHECK(share("attention", "backward", 0) == 0.385);
  CHECK(share("grouped_gemm", "forward", 2560) == doctest::Approx(637.0 / 989).epsilon(1e-3));
  CHECK(share("grouped_gemm", "wgrad", 512) == doctest::Approx(516.0 / 989).epsilon(1e-3));
  CHECK(builtin().hardware("b200-sxm").name == "b200");
}

TEST_CASE("settings change the model or the run, after everything else") {
  TemporaryFolder folder;
  std::ofstream(folder / "run.yaml") << "micro_batch_size: 2\nseq_length: 8192\n";
  ModelProfile p = builtin().model("qwen3-next", {{"num_layers", "12"}, {"seq_length", "2048"}, {"num_query_groups", "4"}, {"gpus", "64"}},
                                   folder / "run.yaml");
  CHECK(p.model.layers() == 12);
  CHECK(p.model.attention.kv_heads == 4);
  CHECK(p.model.published_total == 0); // no longer the published model
  CHECK(p.notes == std::vector<std::string>{"the published parameter counts are not those of this model: num_layers=12, num_query_groups=4"});
  CHECK(p.run.micro_batch == 2);       // run file over profile
  CHECK(p.run.seq == 2048);            // setting over run file
  CHECK(p.run.global_batch == 32);     // profile
  CHECK(p.run.parallel.gpus == 64);
  p = builtin().model("tiny", {{"layer_types", "[full_attention, linear_attention]"}, {"num_layers", "2"}});
  CHECK(p.model.mixers == std::vector<LayerKind>{LayerKind::Attention, LayerKind::Gdn});
  CHECK(has(message_of([] { builtin().model("tiny", {{"num_layer", "3"}}); }), "--set: unknown key 'num_layer'; did you mean 'num_layers'?") );
  CHECK(has(message_of([] { builtin().model("tiny", {{"hidden_size", "010"}}); }), "--set: hidden_size: expected an integer from 1 to 1048576, got '010'"));
  CHECK_THROWS_AS(parse_setting("=3"), Error);
  CHECK_THROWS_AS(parse_setting("micro_batch_size"), Error);
  CHECK(parse_setting("a=b=c").value == "b=c");
}

TEST_CASE("names that are not there") {
  CHECK(has(message_of([] { builtin().model("qwen3.5-35b-a4b"); }), "unknown model 'qwen3.5-35b-a4b'; did you mean 'qwen3.5-35b-a3b'? | known: "));
  CHECK(has(message_of([] { builtin().hardware("h2000"); }), "unknown hardware 'h2000'; did you mean 'h200'? | known: a100-40, "));
  CHECK(has(message_of([] { builtin().model("Qwen/Qwen3.5-35B-A4B"); }), "unknown model 'Qwen/Qwen3.5-35B-A4B'; did you mean 'qwen3.5-35b-a3b'?"));
  CHECK(builtin().model("Qwen/Qwen3.6-35B-A3B").model.name == "qwen3.5-35b-a3b");
  CHECK(has(message_of([] { builtin().model("./nowhere.yaml"); }), "./nowhere.yaml: no such file"));
  CHECK(has(message_of([] { builtin().hardware("/"); }), "is a directory"));
  CHECK(has(message_of([] { builtin().model("/"); }), "config.json: no such file"));
}

TEST_CASE("a folder of profiles adds and overrides") {
  TemporaryFolder folder;
  CHECK(has(message_of([&] { Profiles p(folder.path()); }), "no profiles here"));
  std::filesystem::create_directories(folder / "models");
  std::filesystem::create_directories(folder / "hardware");
  std::string tiny = to_yaml(to_node(builtin().model("tiny", {{"vocab_size", "512"}})));
  std::ofstream(folder / "models" / "a.yaml") << tiny;
  std::ofstream(folder / "models" / "b.yaml")
      << to_yaml(to_node(builtin().model("tiny", {{"name", "mine"}, {"aliases", "[h200]"}})));
  Profiles p(folder.path());
  CHECK(p.models().size() == 21);
  CHECK(p.model("tiny").model.vocab == 512);
  CHECK(p.model("mine").model.vocab == 256);
  CHECK(p.model("mine").model.name == "mine");
  std::ofstream(folder / "hardware" / "x.yaml") << "nam: x\n";
  CHECK(has(message_of([&] { Profiles q(folder.path()); }), "x.yaml:1:1: missing key name"));
}

TEST_CASE("a model file based on a profile changes key by key") {
  TemporaryFolder folder;
  std::string file = (folder / "proxy.yaml").string();
  std::ofstream(file) << "base: Qwen3-Next-80B-A3B\nname: proxy\nnum_layers: 12\nrun:\n  gpus: 8\n  pipeline_model_parallel_size: 1\n";
  ModelProfile p = builtin().model(file, {{"seq_length", "8192"}});
  CHECK(p.model.name == "proxy");
  CHECK(p.model.aliases.empty());
  CHECK(p.model.layers() == 12);
  CHECK(p.model.moe.experts == 512);
  CHECK(p.model.published_total == 0);
  CHECK(p.run.parallel.gpus == 8);
  CHECK(p.run.parallel.ep == 8); // the base's
  CHECK(p.run.seq == 8192);
  std::ofstream(file) << "base: tinny\n";
  CHECK(has(message_of([&] { builtin().model(file); }), "proxy.yaml:1:7: base: unknown model 'tinny'; did you mean 'tiny'?"));
  std::filesystem::create_directories(folder / "models");
  std::ofstream(folder / "models" / "a.yaml") << "name: a\nbase: b\n";
  std::ofstream(folder / "models" / "b.yaml") << "name: b\nbase: a\n";
  CHECK(has(message_of([&] { Profiles(folder.path()).model("a"); }), "based on one another in a circle"));
}

TEST_CASE("model files: what is wrong is said with its place") {
  auto refused = [](const std::string& change_from, const std::string& change_to) {
    std::string text = to_yaml(to_node(builtin().model("tiny").model));
    std::size_t at = text.find(change_from);
    REQUIRE(at != std::string::npos);
    text.replace(at, change_from.size(), change_to);
    return message_of([&] { read_model(parse_yaml(text, "m.yaml")); });
  };
  CHECK(has(refused("hidden_size", "hiden_size"), "m.yaml:3:1: unknown key 'hiden_size'; did you mean 'hidden_size'? | allowed: name, aliases"));
  CHECK(has(refused("vocab_size: 256\n", ""), "m.yaml:1:1: missing key vocab_size"));
  CHECK(has(refused("num_experts_per_tok: 2", "num_experts_per_tok: 9"), "num_experts_per_tok: 9 of 8 experts"));
  CHECK(has(refused("num_key_value_heads: 2", "num_key_value_heads: 3"), "4 heads are not a multiple of 3 key-value heads"));
  CHECK(has(refused("head_dim: 32\nattn", "head_dim: 32\nkv_channels: 32\nattn"), "'kv_channels' and 'head_dim' are one size under two names"));
  CHECK(has(refused("linear_attention_type: gdn", "linear_attention_type: KDA"), "unknown value 'KDA'"));
  CHECK(has(refused("num_hidden_layers: 4", "num_hidden_layers: -4"), "expected an integer from 1 to 4096, got -4"));
  CHECK(has(refused("A_init_range: [1, 16]", "A_init_range: [1]"), "expected a list of two numbers"));
}

TEST_CASE("hardware files: what is wrong is said with its place") {
  auto refused = [](const std::string& from, const std::string& to) {
    std::string text = to_yaml(to_node(builtin().hardware("h200")));
    std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    return message_of([&] { read_hardware(parse_yaml(text, "h.yaml")); });
  };
  CHECK(has(refused("4.8 TB/s", "4.8 TB"), "'4.8 TB' is not a quantity in B/s | write a number and a unit, such as '4.8 TB/s'"));
  CHECK(has(refused("4.8 TB/s", "-4.8 TB/s"), "is not a quantity"));
  CHECK(has(refused("value: 150108897280", "value: 12 parsecs"), "memory.value: '12 parsecs' has an unknown unit"));
  CHECK(has(refused("4.8 TB/s", "0 TB/s"), "bandwidth: must be above 0"));
  CHECK(has(refused("4.2 TB/s", "5.2 TB/s"), "is above the nominal bandwidth"));
  std::string share = refused("value: 0.78", "value: 1.78");
  CHECK(has(share, "efficiencies["));
  CHECK(has(share, "].value: expected a number from 0 to 1, got '1.78"));
  CHECK(has(refused("pass: any", "pass: fwd"), "unknown value 'fwd'"));
  CHECK(has(refused("size: 512", "size: 320"), "a second efficiency for upstream grouped_gemm forward at the same size"));
  CHECK(has(refused("family: attention", "family: atention"), "unknown value 'atention'; did you mean 'attention'?"));
  CHECK(has(refused("family: norm\n", "family: norm\n    op: gatednorm\n"), "unknown value 'gatednorm'; did you mean 'gated_norm'?"));
  CHECK(has(refused("kind: all_gather", "kind: all_reduce"), "a second row for all_reduce on link scale_up"));
  CHECK(has(refused("name: nccl_peer", "name: nccl_ring"), "a second row 'nccl_ring'"));
  CHECK(has(refused("bf16:\n  value: 989 TFLOP/s\n  source:", "bf16:\n  value: 989 TFLOP/s\n  origin:"), "bf16: unknown key 'origin'"));
}

namespace {

void check_equal(const Node& a, const Node& b) {
  CAPTURE(a.where);
  REQUIRE(a.kind == b.kind);
  CHECK(a.text == b.text);
  CHECK(a.quoted == b.quoted);
  CHECK(a.where == b.where);
  CHECK(a.path == b.path);
  REQUIRE(a.items.size() == b.items.size());
  REQUIRE(a.entries.size() == b.entries.size());
  for (size_t i = 0; i < a.items.size(); ++i) check_equal(a.items[i], b.items[i]);
  for (size_t i = 0; i < a.entries.size(); ++i) {
    CHECK(a.entries[i].key == b.entries[i].key);
    CHECK(a.entries[i].where == b.entries[i].where);
    check_equal(a.entries[i].value, b.entries[i].value);
  }
}

} // namespace

TEST_CASE("what is built in as parsed is what its text says") {
  for (const auto* files : {&embedded_models(), &embedded_hardware()})
    for (const EmbeddedFile& f : *files) check_equal(unpack(f.packed, "a: b.yaml"), parse_yaml(f.text, "a: b.yaml"));
  const Node odd = parse_yaml("{a: \"x: y\", b: [~, [], {}, \"\", 'é\n'], \"c d\": null}", "odd.yaml");
  check_equal(unpack(pack(odd), "odd.yaml"), odd);
}
