#include <algorithm>
#include <map>
#include <set>

#include <doctest/doctest.h>

#include "core/error.h"
#include "known_models.h"
#include "model/parameters.h"
#include "model/stages.h"

using namespace gdn;
using namespace gdn::model;
using gdn::test::known_model;

namespace {

std::int64_t sum_of(const ParameterTable& table, const std::string& prefix) {
  std::int64_t sum = 0;
  for (const Parameter& p : table.parameters)
    if (p.name.rfind(prefix, 0) == 0) sum += p.elements();
  return sum;
}

// "layers.3.moe." of the first layer that has the given kind, without norms.
std::int64_t layer_sum(const ParameterTable& table, const std::string& kind) {
  for (const Parameter& p : table.parameters)
    if (p.part == Part::Text && p.local.rfind(kind + ".", 0) == 0)
      return sum_of(table, p.name.substr(0, p.name.size() - p.local.size()) + kind + ".");
  return 0;
}

} // namespace

// Hugging Face safetensors totals (sums), split as the model cards and headers give them.
TEST_CASE("published parameter totals come out exactly") {
  struct Row {
    const char* model;
    std::int64_t text, vision, mtp, sum;
  };
  const Row rows[] = {
      {"qwen3-next-80b-a3b", 79674391296, 0, 1650471424, 81324862720},
      {"qwen3-coder-next", 79674391296, 0, 0, 79674391296},
      {"qwen3.8-2.4t-a95b", 2419804697984, 0, 26378027520, 2446182725504},
      {"qwen3.5-397b-a17b", 396346350336, 456010480, 6595568128, 403397928944},
      {"qwen3.5-122b-a10b", 122111526912, 451290864, 2523679232, 125086497008},
      {"qwen3.5-35b-a3b", 34660610688, 446571248, 844640768, 35951822704},
      {"qwen3.5-27b", 26895998464, 460730096, 424699392, 27781427952},
      {"qwen3.5-9b", 8953803264, 456010480, 243290624, 9653104368},
      {"qwen3.5-4b", 4205751296, 333514240, 120599552, 4659865088},
      {"qwen3.5-2b", 1881825088, 331416576, 60828160, 2274069824},
      {"qwen3.5-0.8b", 752393024, 100592896, 20452864, 873438784},
      {"olmo-hybrid-7b", 7430870688, 0, 0, 7430870688},
      {"kimi-linear-48b-a3b", 49122681728, 0, 0, 49122681728},
      // No exact count is published for these four: arithmetic over their configurations.
      {"jet-nemotron-2b", 1964806208, 0, 0, 1964806208},
      {"jet-nemotron-4b", 3960424768, 0, 0, 3960424768},
      {"fla-gdn-1.3b", 1387348732, 0, 0, 1387348732},
      {"fla-gdn-340m", 512272124, 0, 0, 512272124}};
  for (const Row& r : rows) {
    CAPTURE(r.model);
    const config::Model m = known_model(r.model);
    const ParameterTotals t = totals(parameter_table(m));
    CHECK(m.published_total == r.sum);
    CHECK(t.text == r.text);
    CHECK(t.vision == r.vision);
    CHECK(t.mtp == r.mtp);
    CHECK(t.sum() == r.sum);
  }
}

TEST_CASE("the four smaller models without their two vocabulary matrices") {
  struct Row {
    const char* model;
    std::int64_t matrices, rest;
  };
  for (const Row& r : {Row{"jet-nemotron-2b", 1, 1731432512}, Row{"jet-nemotron-4b", 1, 3649259840},
                       Row{"fla-gdn-1.3b", 2, 1256276732}, Row{"fla-gdn-340m", 2, 446736124}}) {
    const config::Model m = known_model(r.model);
    CHECK(totals(parameter_table(m)).sum() - r.matrices * m.vocab * m.hidden == r.rest);
  }
}

TEST_CASE("parameters of one layer, by kind") {
  struct Row {
    const char* model;
    const char* mixer;
    std::int64_t linear, attention, ffn, routed, routed_total;
  };
  const Row rows[] = {
      {"qwen3-next-80b-a3b", "gdn", 33718464, 27263488, 1614809088, 1610612736, 77309411328},
      {"qwen3.8-2.4t-a95b", "gdn", 438387072, 419430912, 25824337920, 25769803776, 2370821947392},
      {"qwen3.5-397b-a17b", "gdn", 118014208, 104858112, 6457135104, 6442450944, 386547056640},
      {"qwen3.5-122b-a10b", "gdn", 88523008, 78643712, 2426145792, 2415919104, 115964116992},
      {"qwen3.5-35b-a3b", "gdn", 33718464, 27263488, 808978432, 805306368, 32212254720},
      {"qwen3.5-27b", "gdn", 115876064, 104858112, 267386880, 0, 0},
      {"qwen3.5-9b", "gdn", 67403968, 58720768, 150994944, 0, 0},
      {"qwen3.5-4b", "gdn", 42139840, 36700672, 70778880, 0, 0},
      {"qwen3.5-2b", "gdn", 21061792, 14680576, 37748736, 0, 0},
      {"qwen3.5-0.8b", "gdn", 10543264, 7340544, 11010048, 0, 0},
      {"olmo-hybrid-7b", "gdn", 88750332, 58990080, 126812160, 0, 0},
      {"kimi-linear-48b-a3b", "kda", 39514272, 29114880, 1819607296, 1811939328, 47110422528},
      {"jet-nemotron-2b", "jet", 23052568, 5507072, 41287680, 0, 0},
      {"jet-nemotron-4b", "jet", 43073824, 9439744, 67633152, 0, 0},
      {"fla-gdn-1.3b", "gdn", 25215500, 0, 34603008, 0, 0},
      {"fla-gdn-340m", "gdn", 12620300, 0, 8650752, 0, 0}};
  for (const Row& r : rows) {
    CAPTURE(r.model);
    const ParameterTable t = parameter_table(known_model(r.model));
    CHECK(layer_sum(t, r.mixer) == r.linear);
    CHECK(layer_sum(t, "attention") + layer_sum(t, "mla") == r.attention);
    CHECK((r.routed > 0 ? layer_sum(t, "moe") : layer_sum(t, "mlp")) == r.ffn);
    CHECK(layer_sum(t, "moe.experts") == r.routed);
    CHECK(totals(t).routed_text == r.routed_total);
  }
  CHECK(layer_sum(parameter_table(known_model("kimi-linear-48b-a3b")), "mlp") == 63700992);
  // A GDN mixer with its input norm, and as measured in Megatron-LM's module without it.
  const ParameterTable next = parameter_table(known_model("qwen3-next-80b-a3b"));
  CHECK(sum_of(next, "layers.0.gdn.") == 33718464);
  CHECK(sum_of(next, "layers.0.gdn.") + next.at("layers.0.input_norm").elements() == 33720512);
}

TEST_CASE("a GDN2 mixer is wider by its channel-wise gates") {
  config::Model m = known_model("qwen3-next-80b-a3b");
  const std::int64_t gdn = sum_of(parameter_table(m), "layers.0.gdn.");
  m.mixers[0] = config::LayerKind::Gdn2;
  const ParameterTable t = parameter_table(m);
  // in_proj 4*QK + 3*V instead of 2*QK + 2*V + 2*Hv; A_log Hk, dt_bias QK instead of Hv each.
  CHECK(sum_of(t, "layers.0.gdn.") - gdn ==
        2048 * ((4 * 2048 + 3 * 4096) - 12352) + (16 + 2048 - 64));
  CHECK(t.at("layers.0.gdn.in_proj").shape == std::vector<std::int64_t>{20480, 2048});
}

TEST_CASE("active parameters under the three conventions") {
  struct Row {
    const char* model;
    std::int64_t both, without_input, without_both;
  };
  for (const Row& r : {Row{"qwen3-next-80b-a3b", 3874929408, 3563764480, 3252599552},
                       Row{"qwen3.5-397b-a17b", 17349040896, 16331922176, 15314803456},
                       Row{"qwen3.5-122b-a10b", 9771288576, 9008449536, 8245610496},
                       Row{"qwen3.5-35b-a3b", 3454988928, 2946429568, 2437870208},
                       Row{"qwen3.8-2.4t-a95b", 95287866752, 93253629312, 91219391872},
                       Row{"kimi-linear-48b-a3b", 3484459904, 3106972544, 2729485184}}) {
    CAPTURE(r.model);
    const ActiveParameters a = active_parameters(known_model(r.model));
    CHECK(a.both == r.both);
    CHECK(a.without_input_embedding == r.without_input);
    CHECK(a.without_both == r.without_both);
  }
}

// Per-dtype counts of the published checkpoints: A_log and the GDN output norm are the fp32 ones
// (Qwen3.5), A_log and dt_bias in Kimi-Linear.
TEST_CASE("elements that published checkpoints store in fp32") {
  auto count = [](const char* model, std::set<std::string> names) {
    std::int64_t n = 0;
    const ParameterTable table = parameter_table(known_model(model));
    for (const Parameter& p : table.parameters)
      if (names.contains(p.local)) n += p.elements();
    return n;
  };
  for (auto [model, fp32] : {std::pair{"qwen3.5-397b-a17b", 8640},
                             {"qwen3.5-122b-a10b", 6912},
                             {"qwen3.5-9b", 3840},
                             {"qwen3.5-0.8b", 2592}})
    CHECK(count(model, {"gdn.A_log", "gdn.out_norm"}) == fp32);
  CHECK(count("kimi-linear-48b-a3b", {"kda.A_log", "kda.dt_bias"}) == 82560);
  CHECK(2 * totals(parameter_table(known_model("qwen3.5-397b-a17b"))).sum() + 2 * 8640 ==
        806795875168);
  CHECK(2 * totals(parameter_table(known_model("kimi-linear-48b-a3b"))).sum() + 2 * 82560 ==
        98245528576);
}

TEST_CASE("vocabulary is padded to 128 x TP, to another divisor, or not at all") {
  auto padded = [](const char* model, std::int64_t tp) {
    config::Run run;
    run.parallel.tp = tp;
    return padded_vocabulary(known_model(model), run);
  };
  const std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> expected{
      {1, {151936, 248320}},
      {2, {152064, 248320}},
      {4, {152064, 248320}},
      {8, {152576, 248832}},
      {16, {153600, 249856}}};
  for (auto [tp, v] : expected) {
    CHECK(padded("qwen3-next-80b-a3b", tp) == v.first);
    CHECK(padded("qwen3.5-35b-a3b", tp) == v.second);
  }
  config::Run run;
  run.parallel.tp = 2;
  run.vocab_divisor = 1187; // the Model Zoo's way to keep 151,936
  CHECK(padded_vocabulary(known_model("qwen3-next-80b-a3b"), run) == 151936);
  run.vocab_divisor = 0;
  run.parallel.tp = 16;
  CHECK(padded_vocabulary(known_model("qwen3-next-80b-a3b"), run) == 151936);
}

TEST_CASE("names are unique and sections add up to the dimension they divide") {
  for (const config::Model& m : gdn::test::known_models()) {
    std::set<std::string> names;
    const ParameterTable table = parameter_table(m);
    for (const Parameter& p : table.parameters) {
      CAPTURE(p.name);
      CHECK(names.insert(p.name).second);
      std::int64_t sum = 0;
      for (const Section& s : p.sections) {
        sum += s.size;
        CHECK(s.rule == p.rule());
      }
      CHECK(sum == p.shape[static_cast<size_t>(p.dim)]);
    }
  }
}

TEST_CASE("an unknown parameter name suggests the nearest one") {
  const ParameterTable t = parameter_table(known_model("qwen3.5-35b-a3b"));
  CHECK(t.find("layers.0.gdn.inproj") == nullptr);
  CHECK_THROWS_WITH_AS(t.at("layers.0.gdn.inproj"), doctest::Contains("layers.0.gdn.in_proj"),
                       Error);
}

// An even cut of the rows [Q | K | V | Z | beta | alpha] at TP2 would cut through V.
TEST_CASE("in_proj rows are split section by section") {
  config::Model m = known_model("qwen3-next-80b-a3b");
  m.gdn.key_heads = 4;
  m.gdn.value_heads = 16;
  const ParameterTable t = parameter_table(m);
  const Parameter& p = t.at("layers.0.gdn.in_proj");
  CHECK(p.shape[0] == 5152);
  CHECK(p.section("z").size == 2048);
  config::Parallel tp2;
  tp2.tp = 2;
  tp2.gpus = 2;
  CHECK(shard_rows(p, tp2, 0) ==
        std::vector<RowRange>{
            {0, 256}, {512, 256}, {1024, 1024}, {3072, 1024}, {5120, 8}, {5136, 8}});
  CHECK(shard_rows(p, tp2, 1) ==
        std::vector<RowRange>{
            {256, 256}, {768, 256}, {2048, 1024}, {4096, 1024}, {5128, 8}, {5144, 8}});
  CHECK(shard_rows(t.at("layers.0.gdn.conv1d"), tp2, 1) ==
        std::vector<RowRange>{{256, 256}, {768, 256}, {2048, 1024}});
}

TEST_CASE("the shards of every parameter cover it exactly once") {
  config::Model m = known_model("qwen3.5-35b-a3b");
  m.tied_embeddings = true;
  config::Parallel parallel;
  parallel.tp = parallel.etp = 4; // more than the two key-value heads
  parallel.ep = 2;
  parallel.gpus = 8;
  const ParameterTable table = parameter_table(m);
  for (const Parameter& p : table.parameters) {
    CAPTURE(p.name);
    const std::int64_t ranks = p.rule() == ShardRule::Replicated ? 1 : 4;
    std::vector<int> seen(static_cast<size_t>(p.shape[static_cast<size_t>(p.dim)]));
    for (std::int64_t r = 0; r < ranks; ++r)
      for (const RowRange& range : shard_rows(p, parallel, r))
        for (std::int64_t i = range.first; i < range.first + range.count; ++i)
          ++seen[static_cast<size_t>(i)];
    CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    const std::int64_t ep = p.group == ParameterGroup::RoutedExpert ? 2 : 1;
    CHECK(local_elements(p, parallel) * ranks * ep == p.elements());
  }
}

TEST_CASE("tensor parallelism beyond the key-value heads") {
  // 24 query and 4 key-value heads on 8 ranks: 3 query and 3 gate heads, one replicated kv head.
  HeadsPerRank h = attention_heads_per_rank(known_model("qwen3.5-27b").attention, 8);
  CHECK(h.query == 3);
  CHECK(h.gate == 3);
  CHECK(h.kv == 1);
  CHECK(h.kv_replicas == 2);
  h = attention_heads_per_rank(known_model("qwen3.5-27b").attention, 2);
  CHECK(h.kv == 2);
  CHECK(h.kv_replicas == 1);
  // GDN weight bytes divide by TP, but for the replicated output norm.
  const ParameterTable t = parameter_table(known_model("qwen3-next-80b-a3b"));
  for (std::int64_t tp : {4, 16}) {
    config::Parallel parallel;
    parallel.tp = parallel.gpus = tp;
    std::int64_t local = 0;
    for (const Parameter& p : t.parameters)
      if (p.name.rfind("layers.0.gdn.", 0) == 0) local += local_elements(p, parallel);
    CHECK((local - 128) * tp == 33718464 - 128);
  }
  config::Parallel parallel;
  parallel.tp = parallel.gpus = 64;
  CHECK_THROWS_WITH_AS(local_elements(t.at("layers.0.gdn.A_log"), parallel),
                       doctest::Contains("tp = 64"), Error);
}

TEST_CASE("pipeline chunks: even, interleaved, laid out, refused") {
  config::Parallel p;
  p.pp = 4;
  p.vp = 2;
  p.gpus = 4;
  std::vector<Chunk> rank1 = chunks_of_rank(48, p, 1);
  REQUIRE(rank1.size() == 2);
  CHECK(rank1[0].first == 6);
  CHECK(rank1[1].first == 30);
  CHECK(rank1[1].layers == 6);
  CHECK(pipeline_chunks(48, p).back().is_last);
  p.vp = 1;
  p.layout = {13, 13, 13, 9};
  CHECK(chunks_of_rank(48, p, 3)[0].first == 39);
  p.layout = {13, 13, 13, 8};
  CHECK_THROWS_WITH_AS(pipeline_chunks(48, p), doctest::Contains("48 layers"), Error);
  p.layout = {};
  p.pp = 8;
  CHECK_THROWS_WITH_AS(pipeline_chunks(60, p), doctest::Contains("60 layers do not divide by pp 8"),
                       Error);
}

TEST_CASE("what each pipeline rank holds") {
  const config::Model m = known_model("qwen3.5-4b"); // tied, with MTP and a tower
  config::Run run;
  run.vision = config::VisionMode::Trained;
  const ParameterTable t = parameter_table(m, run);
  const ParameterTotals all = totals(t);
  const std::int64_t matrix = 248320 * 2560;
  CHECK(rank_elements(t, m, run, 0).total() == all.sum());
  run.parallel.pp = run.parallel.gpus = 2;
  // Megatron-LM gives the last stage the embedding for MTP and, tied, an output weight of its own.
  CHECK(rank_elements(t, m, run, 0).total() + rank_elements(t, m, run, 1).total() ==
        all.sum() + 2 * matrix);
  run.stack = "native";
  CHECK(rank_elements(t, m, run, 0).total() + rank_elements(t, m, run, 1).total() ==
        all.sum() + matrix);
  run.stack = "megatron";
  run.train_mtp = false;
  run.vision = config::VisionMode::Absent;
  const ParameterTable text = parameter_table(m, run);
  CHECK(totals(text).sum() == all.text);
  CHECK(rank_elements(text, m, run, 0).total() + rank_elements(text, m, run, 1).total() ==
        all.text + matrix);

  const config::Model moe = known_model("qwen3.5-35b-a3b");
  config::Run ep;
  ep.parallel.ep = ep.parallel.gpus = 8;
  const ParameterTable table = parameter_table(moe, ep);
  CHECK(rank_elements(table, moe, ep, 0).expert == (32212254720 + 805306368) / 8);
  CHECK(rank_elements(table, moe, ep, 0).dense == 2448355968 + (844640768 - 805306368));
}
