#include <algorithm>
#include <set>

#include <doctest/doctest.h>

#include "model/native/ends.h"
#include "model/native/layer.h"
#include "tests/program/compare.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::LayerKind;
using config::MlpKind;
using model::OpKind;

namespace {

config::Run native_run() {
  config::Run run = one_gpu(config::Build::Te);
  run.stack = "native";
  return run;
}

struct Measured {
  Bytes retained, backward;
  std::vector<std::string> replayed; // op names, every replay of a step
  bool replays_exchange = false;
};

Measured measure(const model::OpList& list, const std::vector<std::string>& modules, bool module_alone) {
  std::vector<model::Span> spans = model::spans_for(list, modules, {}, "native");
  program::TraceOptions options;
  options.external_output_gradient = module_alone;
  program::UnitTrace trace = program::trace(list, spans, model::upstream_provider(), options);
  program::Levels levels = program::levels(trace);
  Measured m{levels.retained, levels.backward.bytes, {}, false};
  for (const program::Event& e : trace.events)
    if (e.pass == program::Pass::Replay) {
      const model::Op& op = list.ops[static_cast<size_t>(e.op)];
      m.replayed.push_back(op.name);
      m.replays_exchange = m.replays_exchange || !op.collectives.empty();
    }
  return m;
}

Measured module_bytes(const config::Model& m, const config::Run& run, const std::string& module,
                      const std::vector<std::string>& modules = {}) {
  return measure(model::native::module_list(m, run, module), modules, true);
}

bool heavy(OpKind kind) {
  return std::set<OpKind>{OpKind::Linear, OpKind::GroupedLinear, OpKind::LmHead, OpKind::LinearCrossEntropy, OpKind::Rule,
                          OpKind::Gdn2Rule, OpKind::CoreAttention}
      .count(kind) > 0;
}

// Heavy ops and exchanges among the replays of a list.
std::vector<std::string> heavy_replays(const model::OpList& list, const Measured& m) {
  std::vector<std::string> names;
  for (const std::string& name : m.replayed)
    if (heavy(list.ops[static_cast<size_t>(list.find_op(name))].kind)) names.push_back(name);
  return names;
}

constexpr std::int64_t kTokens = 8192;

} // namespace

TEST_CASE("bytes kept by a module of the reference shape, a token") {
  const config::Model m = reference_model();
  const config::Run run = native_run();
  // x; q | gate | k | v; output of the core; log-sum-exp: 2h + 2(2nd + 2gd) + 2nd + 4n
  CHECK(module_bytes(m, run, "attention").retained == kTokens * (4096 + 18432 + 8192 + 64));
  // x; FC1: 2h + 4 ffn
  CHECK(module_bytes(m, run, "mlp").retained == kTokens * (4096 + 20480));
  // x; projection q | k | v | z | f | b | w; output of the rule; two 64-wide matrices: 2h + 2(4QK + 3V) + 2V + 256 Hv
  CHECK(module_bytes(m, run, "gdn2").retained == kTokens * (4096 + 40960 + 8192 + 8192));
  // x; logits; weights, experts, row map, row weights; FC1 of routed and shared experts; the gate's score:
  // 2h + 4E + 16k + 4fk + 4fs + 4, and once the counts and offsets of E experts
  CHECK(module_bytes(m, run, "moe").retained == kTokens * (4096 + 2048 + 160 + 20480 + 2048 + 4) + 4 * 512 + 4 * 513);
}

TEST_CASE("routing keeps what its scores need") {
  config::Model m = reference_model();
  const config::Run run = native_run();
  const Bytes with_loss = module_bytes(m, run, "moe").retained;
  m.moe.aux_loss_coeff = 0; // the weights alone give the gradient: no logits, no counts
  CHECK(module_bytes(m, run, "moe").retained == with_loss - kTokens * 2048 - 4 * 512);
  m.moe.score = "sigmoid"; // the logits, not the weights
  CHECK(module_bytes(m, run, "moe").retained == with_loss - kTokens * 40 - 4 * 512);
  m.moe.score = "softmax";
  m.moe.z_loss_coeff = 1e-3;
  CHECK(module_bytes(m, run, "moe").retained == with_loss);
}

TEST_CASE("no GEMM, rule, attention or exchange runs again by default") {
  config::Model m = reference_model();
  m.mtp_layers = 1;
  std::vector<config::Run> runs(6, native_run());
  runs[1].parallel.tp = 4; // more ranks than kv heads
  runs[1].parallel.sequence_parallel = true;
  runs[2].parallel.cp = 2;
  runs[3].parallel.ep = 8;
  runs[3].parallel.etp = 2;
  runs[4].moe_capacity_factor = 1.25;
  runs[5].parallel.cp = 2;
  runs[5].cp_comm_type = "a2a";
  for (const config::Run& run : runs)
    for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention})
      for (MlpKind mlp : {MlpKind::Moe, MlpKind::Dense}) {
        const model::OpList list = model::native::decoder_layer(m, run, mixer, mlp);
        CAPTURE(list.name);
        const Measured now = measure(list, {}, false);
        CHECK(heavy_replays(list, now).empty());
        CHECK_FALSE(now.replays_exchange);
        CHECK(now.replayed.size() >= 4);
      }
  const model::OpList head = model::native::head_unit(m, native_run());
  const Measured now = measure(head, {}, false);
  CHECK(heavy_replays(head, now).empty());
  CHECK(std::count(now.replayed.begin(), now.replayed.end(), "mtp0.eh_concat") == 1);
}

TEST_CASE("every default is off by its name, and then keeps its own bytes") {
  const config::Model m = reference_model();
  const config::Run run = native_run();
  struct Row {
    const char* module;
    const char* off;
    std::int64_t more;  // bytes a token
  };
  for (const Row& row : {Row{"gdn", "-input_norm", 4096 + 4},            // output, statistic
                         Row{"gdn", "-gdn_pre", 4096 + 4096 + 8192 + 128}, // q, k, v, beta; g is not read
                         Row{"gdn", "-gated_norm", 8192 + 128},
                         Row{"gdn2", "-gdn_pre", 3 * 4096 + 8192 + 2 * 8192}, // q, k, b, fp32 g, v, w
                         Row{"attention", "-attention_pre", 8192 + 2 * 1024},
                         Row{"attention", "-output_gate", 8192},
                         Row{"moe", "-mlp_norm", 4096 + 4},
                         Row{"moe", "-expert_rows", 10 * 4096},
                         Row{"moe", "-expert_act", 10 * 1024},
                         Row{"moe", "-shared_act", 1024},
                         Row{"mlp", "-mlp_act", 10240},
                         Row{"mlp", "-mlp_norm", 4096 + 4}}) {
    CAPTURE(row.off);
    CHECK(module_bytes(m, run, row.module, {row.off}).retained ==
          module_bytes(m, run, row.module).retained + kTokens * row.more);
  }
}

TEST_CASE("user modules: what each frees and which heavy ops it runs again") {
  const config::Model m = reference_model();
  const config::Run run = native_run();
  struct Row {
    LayerKind mixer;
    MlpKind mlp;
    const char* module;
    std::int64_t freed; // bytes a token
    std::vector<std::string> heavy;
  };
  // Residual streams x and m (2h each) stay in every case.
  for (const Row& row : {Row{LayerKind::Gdn, MlpKind::Moe, "gdn_proj", 24704, {"in_proj"}},
                         Row{LayerKind::Gdn, MlpKind::Moe, "gdn_rule", 12416, {"rule"}}, // o, and of 64 tokens the inverse and g
                         Row{LayerKind::Gdn, MlpKind::Moe, "gdn", 37120, {"in_proj", "rule"}},
                         Row{LayerKind::Gdn2, MlpKind::Moe, "gdn_proj", 40960, {"in_proj"}},
                         Row{LayerKind::Gdn2, MlpKind::Moe, "gdn_rule", 16384, {"rule"}}, // o and two matrices of 64 columns
                         Row{LayerKind::Attention, MlpKind::Moe, "attention_proj", 18432, {"linear_qkv"}},
                         Row{LayerKind::Attention, MlpKind::Moe, "attention", 26688, {"linear_qkv", "core_attention"}},
                         Row{LayerKind::Gdn, MlpKind::Moe, "moe_fc1", 20480, {"expert_fc1"}},
                         Row{LayerKind::Gdn, MlpKind::Moe, "shared_fc1", 2048, {"shared_fc1"}},
                         Row{LayerKind::Gdn, MlpKind::Dense, "mlp_fc1", 20480, {"mlp_fc1"}},
                         Row{LayerKind::Gdn, MlpKind::Dense, "mlp", 20480, {"mlp_fc1"}}}) {
    CAPTURE(row.module);
    const model::OpList list = model::native::decoder_layer(m, run, row.mixer, row.mlp);
    const Measured plain = measure(list, {}, false), with = measure(list, {row.module}, false);
    CHECK(plain.retained - with.retained == kTokens * row.freed);
    CHECK(heavy_replays(list, with) == row.heavy);
  }
  const model::OpList list = model::native::decoder_layer(m, run, LayerKind::Gdn, MlpKind::Moe);
  // What both leave is the residual stream, as under gdn, at one replay of each.
  const Measured halves = measure(list, {"gdn_proj", "gdn_rule"}, false);
  CHECK(halves.retained == measure(list, {"gdn"}, false).retained);
  CHECK(heavy_replays(list, halves) == std::vector<std::string>{"in_proj", "rule"});
  // The whole MoE keeps m alone; the op with effects does not run again.
  const Measured moe = measure(list, {"moe"}, false);
  CHECK(moe.retained == kTokens * (37120 + 2 * 4096));
  CHECK(heavy_replays(list, moe) == std::vector<std::string>{"shared_fc1", "router", "expert_fc1"});
  CHECK(std::count(moe.replayed.begin(), moe.replayed.end(), "router_loss") == 0);
  CHECK(measure(list, {"moe", "gdn", "moe_fc1"}, false).retained == kTokens * 2 * 4096);
}

TEST_CASE("ranks divide what is kept") {
  const config::Model m = reference_model();
  config::Run run = native_run();
  run.parallel.tp = 2;
  run.parallel.sequence_parallel = true;
  const std::int64_t half = kTokens / 2;
  // Hidden rows and head columns both halve; scores of the gate are gathered, [N].
  CHECK(module_bytes(m, run, "attention").retained == half * (4096 + 18432 + 8192 + 64));
  CHECK(module_bytes(m, run, "gdn").retained == half * (4096 + 37120));
  CHECK(module_bytes(m, run, "moe").retained == half * (4096 + 2048 + 160 + 20480 + 2048 + 2 * 4) + 4 * 512 + 4 * 513);

  run = native_run();
  run.parallel.tp = 4; // one kv head on two ranks each: the group's columns are kept, not a shard of all
  run.parallel.sequence_parallel = true;
  CHECK(module_bytes(m, run, "attention").retained == kTokens / 4 * 4096 + kTokens * (9216 + 2048 + 16));

  run = native_run();
  run.parallel.cp = 2; // the exchanged norm output is kept: no exchange is replayed
  CHECK(module_bytes(m, run, "gdn").retained == half * (4096 + 37120 + 8192) + half * 128);
  CHECK(module_bytes(m, run, "gdn", {"gdn_norm_out"}).retained == half * (4096 + 37120));
  run.cp_comm_type = "a2a"; // q, k, v and the output as the exchange made them, and the output again for its gate
  CHECK(module_bytes(m, run, "attention").retained == half * (4096 + 18432 + 8192 + 2 * 1024 + 2 * 8192 + 64));

  run = native_run();
  run.parallel.ep = 8; // rows received are kept with their weights; sizes on the device
  CHECK(module_bytes(m, run, "moe").retained ==
        kTokens * (4096 + 2048 + 120 + 10 * (4096 + 4 + 2048) + 2048 + 4) + 4 * 512 + 4 * 513 + 4 * 65 + 4 * 512);
  run.moe_imbalance = 1.5;
  CHECK(module_bytes(m, run, "moe").retained ==
        kTokens * (4096 + 2048 + 120 + 15 * (4096 + 4 + 2048) + 2048 + 4) + 4 * 512 + 4 * 513 + 4 * 65 + 4 * 512);
  // Whatever the exchange brought is exchanged again: what is kept does not grow with the imbalance.
  CHECK(module_bytes(m, run, "moe", {"moe_fc1"}).retained == kTokens * (4096 + 2048 + 160 + 2048 + 4) + 4 * 512 + 4 * 513);
}

TEST_CASE("the head keeps one hidden state and a log-sum-exp a token") {
  config::Model m = reference_model();
  config::Run run = native_run();
  // x, y, statistic, labels, log-sum-exp
  auto kept = [&] { return measure(model::native::head_unit(m, run), {}, false).retained; };
  CHECK(kept() == kTokens * (4096 + 4096 + 4 + 8 + 4));
  run.cross_entropy = config::CrossEntropy::FusedTe; // the gradient over the logits, vocabulary padded to 128
  CHECK(kept() == kTokens * (4096 + 4096 + 4) + kTokens * 2 * 151936);
  run.cross_entropy = config::CrossEntropy::FusedNative;
  CHECK(kept() == kTokens * (4096 + 4096 + 4 + 8 + 4) + kTokens * 2 * 151936);
  run.cross_entropy = config::CrossEntropy::Unfused;
  m.mtp_layers = 1;
  // and per depth: ids, embeddings, statistics of both entry norms are rebuilt; an attention + MoE
  // layer with its two residual streams; its last norm; labels and log-sum-exp
  const std::int64_t layer = 4096 + 26688 + 4096 + 24740;
  CHECK(kept() == kTokens * (4096 + 4096 + 4 + 8 + 4) + kTokens * (8 + 4096 + layer + 4096 + 4096 + 4 + 8 + 4) + 4 * 512 + 4 * 513);
}

TEST_CASE("the engine's trace of every layer is what an interpreter executes, under any modules") {
  config::Model m = reference_model();
  m.mtp_layers = 1;
  config::Run run = native_run();
  run.seq = 256;
  config::Run ranks = run;
  ranks.parallel.ep = 8;
  ranks.parallel.cp = 2;
  auto agree = [](model::OpList list, std::vector<model::Span> spans) {
    const toy::Case c{0, std::move(list), std::move(spans), {}};
    std::string what;
    CHECK(brute::difference(c, model::upstream_provider(), &what) == "");
    CHECK(what == "ok");
  };
  const std::vector<std::vector<std::string>> settings{
      {}, {"gdn_proj", "attention_proj", "moe_fc1", "shared_fc1", "mlp_fc1"}, {"gdn", "attention", "moe", "mlp"},
      {"gdn_rule"}, {"gdn_rule", "gdn_proj", "gdn_norm_out"}, {"gdn", "gdn_rule"},
      {"gdn", "gdn_proj", "moe", "moe_fc1", "-expert_act"}, {"-input_norm", "-mlp_norm", "-gdn_pre", "-attention_pre", "moe_fc1"}};
  for (const config::Run& r : {run, ranks})
    for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention})
      for (MlpKind mlp : {MlpKind::Moe, MlpKind::Dense}) {
        const model::OpList list = model::native::decoder_layer(m, r, mixer, mlp);
        CAPTURE(list.name);
        for (const auto& modules : settings) agree(list, model::spans_for(list, modules, {}, "native"));
        agree(list, model::full_spans(list, "native"));
      }
  // Without norms on q and k no backward reads the projection, only the replay that rotates its columns again.
  config::Model plain = m;
  plain.attention.qk_norm = false;
  const model::OpList rotated = model::native::decoder_layer(plain, run, LayerKind::Attention, MlpKind::Dense);
  for (const auto& modules : settings) agree(rotated, model::spans_for(rotated, modules, {}, "native"));
  const model::OpList head = model::native::head_unit(m, run);
  for (const auto& modules : settings) agree(head, model::spans_for(head, modules, {}, "native"));
}
