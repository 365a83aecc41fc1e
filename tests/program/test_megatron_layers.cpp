#include <doctest/doctest.h>

#include <fmt/core.h>

#include "core/error.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;
using config::LayerKind;
using config::MlpKind;
using Modules = std::vector<std::string>;

namespace {

double attention_retained(const config::Model& m, const config::Run& run, const Modules& modules = {}) {
  return retained_per_token(module_alone(m, run, "attention", modules));
}

} // namespace

// ------------------------------------------------------------------------------- attention ----

TEST_CASE("gated attention: what is pinned, kept and freed") {
  const config::Model m = reference_model(); // n 16, g 2, d 256
  const config::Run te = one_gpu(Build::Te);
  const Traced t = module_alone(m, te, "attention");
  CHECK(retained_per_token(t) == 69772); // x included
  CHECK(bytes_of(t, "mixed") == 2 * (2 * 4096 + 2 * 512));
  CHECK(bytes_of(t, "q_copy") == 8192);
  CHECK(bytes_of(t, "attn_lse") == 64);
  CHECK(attention_retained(m, one_gpu(Build::Local)) == 69772 - 4100); // x is the normalised input there
  // core_attn: the log-sum-exp alone goes where the core is fused.
  CHECK(attention_retained(m, te, {"core_attn"}) == 69772 - 64);
  CHECK(attention_retained(m, te, {"gdn_qkv", "gdn_norm_out", "moe", "mlp"}) == 69772); // none of them has ops here
}

TEST_CASE("attention without q/k norm: nothing pins the projection once v is copied") {
  config::Model m = reference_model();
  m.attention.qk_norm = false;
  // mixed (18,432), the q copy (8,192) and both statistics (72) go.
  CHECK(attention_retained(m, one_gpu(Build::Te)) == 69772 - 18432 - 8192 - 72);
  m.attention.output_gate = false; // a plain grouped-query layer: no gate, and its product is the output itself
  CHECK(attention_retained(m, one_gpu(Build::Te)) == 69772 - 18432 - 8192 - 72 - 8192 - 8192);
  m.attention.rope = false; // copies take the place of the rotated q and k
  CHECK(attention_retained(m, one_gpu(Build::Te)) == 69772 - 18432 - 8192 - 72 - 8192 - 8192);
}

TEST_CASE("whole-vector q/k norm keeps one statistic a token") {
  config::Model m = reference_model();
  m.attention.whole_vector_qk_norm = true;
  CHECK(attention_retained(m, one_gpu(Build::Te)) == 69772 - (64 + 8) + (4 + 4));
}

TEST_CASE("unfused core attention keeps scores and probabilities, which core_attn frees") {
  const config::Model m = reference_model();
  config::Run run = one_gpu(Build::Te);
  run.fused_attention = false;
  const double square = 16 * 8192 * 2; // heads x keys x 2 bytes, a token
  CHECK(attention_retained(m, run) == 69772 - 64 + 2 * square);
  CHECK(attention_retained(m, run, {"core_attn"}) == 69772 - 64);
  run.attention_dropout = 0.1;
  CHECK(attention_retained(m, run) == 69772 - 64 + 2.5 * square);
}

TEST_CASE("tensor parallelism beyond the kv heads: one replicated head, a transient gather") {
  config::Model m; // 24 query and 4 kv heads at TP 8
  m.name = "27b";
  m.hidden = 5120;
  m.gdn.value_heads = 48;
  m.attention.heads = 24;
  m.attention.kv_heads = 4;
  config::Run run = one_gpu(Build::Te, "main", 4096);
  run.parallel.tp = run.parallel.gpus = 8;
  run.parallel.sequence_parallel = true;
  const Traced t = module_alone(m, run, "attention");
  auto heads = [&](const char* tensor) { return t.list.tensor(t.list.find_tensor(tensor)).shape[1]; };
  CHECK(heads("q_rot") == 3);
  CHECK(heads("gate") == 3);
  CHECK(heads("k_rot") == 1);
  CHECK(heads("v_attn") == 1);
  const double all = 2 * (2 * 24 * 256 + 2 * 4 * 256); // bytes a token of the whole projection
  CHECK(bytes_of(t, "mixed") == all / 8);
  CHECK(bytes_of(t, "mixed_gathered") == all);
  // The gathered tensor is no part of what is kept: without the q/k norm not even the group is.
  m.attention.qk_norm = false;
  const Traced plain = module_alone(m, run, "attention");
  CHECK(retained_per_token(plain) == doctest::Approx((2 * 2 * 5120 + 4) / 8.0 + 2 * 256 * (3 + 1 + 1 + 3 + 3 + 3) + 4 * 3));
  const model::Op& gather = op_of(t, "linear_qkv.gather");
  CHECK(gather.collectives[0].bytes == static_cast<Bytes>(all) * 4096);
  CHECK(gather.steps[0].collectives[0].kind == model::CollectiveKind::ReduceScatter);
  // At 4 ranks every rank has whole groups and nothing is gathered.
  run.parallel.tp = run.parallel.gpus = 4;
  CHECK(module_alone(m, run, "attention").list.find_op("linear_qkv.gather") < 0);
}

TEST_CASE("attention under context parallelism: what cp_comm_type moves") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.cp = run.parallel.gpus = 4;
  const Bytes kv = 2 * 1024 * 2048; // bytes of k and v of this rank's 2,048 tokens
  auto core = [&](const char* type) {
    run.cp_comm_type = type;
    const Traced t = module_alone(reference_model(), run, "attention");
    return op_of(t, "core_attention");
  };
  CHECK(core("p2p").collectives[0].bytes == 3 * kv);
  CHECK(core("p2p").steps[0].collectives[0].bytes == 6 * kv);
  CHECK(core("all_gather").collectives[0].bytes == 4 * kv);
  CHECK(core("p2p").collectives[0].group == model::Group::Cp);
  CHECK_THROWS_AS(core("ring"), Error);
  CHECK_THROWS_AS(core("a2a"), Error); // 2 key-value heads do not go over 4 ranks
}

TEST_CASE("attention under context parallelism by all-to-all: whole sequences, fewer heads, the output twice") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.cp = run.parallel.gpus = 2;
  auto kept = [&](const char* type) {
    run.cp_comm_type = type;
    return program::levels(module_alone(reference_model(), run, "attention").trace).retained;
  };
  run.cp_comm_type = "a2a";
  const Traced t = module_alone(reference_model(), run, "attention");
  const Bytes q = 4096 * 16 * 256 * 2; // of this rank's 4,096 tokens and 16 heads
  CHECK(op_of(t, "cp_a2a_q").collectives[0].bytes == q);
  CHECK(op_of(t, "cp_a2a_out").collectives[0].bytes == q);
  CHECK(op_of(t, "core_attention").collectives.empty());
  CHECK(t.list.tensor(op_of(t, "core_attention").inputs[0]).shape == std::vector<std::int64_t>{8192, 8, 256});
  CHECK(kept("a2a") - kept("p2p") == q);
}

// -------------------------------------------------------------------------------------- MoE ----

TEST_CASE("MoE layer: every storage, and the expert side") {
  const Traced t = module_alone(reference_model(), one_gpu(Build::Te), "moe"); // E 512, k 10, f = fs = 512
  const std::pair<const char*, double> rows[] = {
      {"x", 4096},        {"probs", 2048},    {"map", 512},      {"scores", 40},   {"top_indices", 80}, {"scatter_indices", 80},
      {"aux_scores", 2048}, {"row_map", 4100}, {"permuted", 40960}, {"permuted_prob", 40}, {"e_fc1", 20480}, {"e_act", 10240},
      {"sh_fc1", 2048},   {"sh_act", 1024},   {"sh_out", 4096},  {"sh_score", 2}};
  double sum = 0;
  for (auto [name, bytes] : rows) {
    CAPTURE(name);
    CHECK(bytes_of(t, name) == bytes);
    sum += bytes;
  }
  CHECK(retained_per_token(t) == sum);
  CHECK(bytes_of(t, "permuted") + bytes_of(t, "permuted_prob") + bytes_of(t, "e_fc1") + bytes_of(t, "e_act") == 71720);
  // Router bookkeeping with an auxiliary loss and fused permutation: 17 E, and 4 of the row map's end.
  CHECK(bytes_of(t, "probs") + bytes_of(t, "map") + bytes_of(t, "aux_scores") + bytes_of(t, "row_map") == 17 * 512 + 4);
}

TEST_CASE("router variants change what is kept") {
  config::Model m = reference_model();
  config::Run run = one_gpu(Build::Te);
  const double base = retained_per_token(module_alone(m, run, "moe"));
  auto change = [&](auto edit) {
    config::Model changed = m;
    config::Run changed_run = run;
    edit(changed, changed_run);
    return retained_per_token(module_alone(changed, changed_run, "moe")) - base;
  };
  CHECK(change([](auto&, auto& r) { r.moe_permute_fusion = false; }) == 80 - 4100);
  CHECK(change([](auto& c, auto&) { c.moe.aux_loss_coeff = 0; }) == -2048);
  CHECK(change([](auto& c, auto&) { c.moe.z_loss_coeff = 1e-3; }) == 2048);     // the logits stay
  CHECK(change([](auto& c, auto&) { c.moe.score = "sigmoid"; }) == 2048 - 40);  // scores of all experts
  CHECK(change([](auto& c, auto&) { c.moe.renormalise = false; }) == 2048 - 40);
  CHECK(change([](auto& c, auto&) { c.moe.router_dtype = DType::BF16; }) == -1024 - 20);
  CHECK(change([](auto& c, auto&) { c.moe.shared_gate = false; }) == -(4096 + 2));
  CHECK(change([](auto& c, auto&) { c.moe.shared_ffn = 0; }) == -(2048 + 1024 + 4096 + 2));
}

TEST_CASE("rows that enter the experts: balanced, imbalanced, padded; EP keeps them, ETP multiplies them") {
  const config::Model m = reference_model();
  auto rows = [&](std::int64_t ep, std::int64_t etp, double imbalance, std::optional<double> capacity) {
    config::Run run = one_gpu(Build::Te);
    run.parallel.ep = ep;
    run.parallel.etp = etp;
    run.parallel.gpus = ep * etp;
    run.moe_imbalance = imbalance;
    run.moe_capacity_factor = capacity;
    const Traced t = module_alone(m, run, "moe");
    return t.list.tensor(op_of(t, "expert_fc1").inputs[0]).rows();
  };
  CHECK(rows(1, 1, 1, {}) == 81920);
  CHECK(rows(8, 1, 1, {}) == 81920);
  CHECK(rows(8, 2, 1, {}) == 163840);
  CHECK(rows(8, 1, 1.5, {}) == 122880);
  CHECK(rows(1, 1, 1.5, {}) == 81920); // one rank holds all experts: the count is exact
  CHECK(rows(8, 1, 1, 2.0) == 320 * 64 * 8); // ceil(8192 * 10 / 512 * 2) rows an expert
}

TEST_CASE("expert parallelism: exchanges with their bytes, dispatched rows kept in place of sent ones") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.ep = 8;
  run.parallel.etp = 2;
  run.parallel.gpus = 16;
  const Traced t = module_alone(reference_model(), run, "moe", {"moe"});
  const model::Op &out = op_of(t, "dispatch"), &home = op_of(t, "combine");
  const Bytes sent = Bytes{81920} * (4096 + 4), received = Bytes{163840} * (4096 + 4); // rows and their probabilities
  REQUIRE(out.collectives.size() == 2);
  CHECK(out.collectives[0].kind == model::CollectiveKind::AllToAll);
  CHECK(out.collectives[0].group == model::Group::Ep);
  CHECK(out.collectives[0].bytes == sent);
  CHECK(out.collectives[1].kind == model::CollectiveKind::AllGather);
  CHECK(out.collectives[1].group == model::Group::Etp);
  CHECK(out.collectives[1].bytes == received);
  CHECK(out.steps[0].collectives[0].kind == model::CollectiveKind::ReduceScatter);
  CHECK(home.collectives[0].kind == model::CollectiveKind::ReduceScatter);
  CHECK(home.collectives[1].bytes == Bytes{81920} * 4096);
  // Whole-block recompute pays dispatch and combine a second time.
  int again = 0;
  for (const program::Event& e : t.trace.events) {
    const model::OpKind kind = t.list.ops[static_cast<size_t>(e.op)].kind;
    again += e.pass == program::Pass::Replay && (kind == model::OpKind::Dispatch || kind == model::OpKind::CombineDispatch);
  }
  CHECK(again == 2);
  const Traced kept = module_alone(reference_model(), run, "moe");
  for (const program::Buffer& b : kept.trace.buffers)
    if (!b.gradient && kept.list.tensor(b.tensor).name == "permuted") CHECK(b.last < kept.trace.forward_end);
}

TEST_CASE("MoE modules: moe_act, shared_experts, moe, and nests that add nothing") {
  const config::Model m = reference_model();
  const config::Run run = one_gpu(Build::Te);
  auto retained = [&](const Modules& modules) {
    return retained_per_token(whole_layer(m, run, LayerKind::Gdn, MlpKind::Moe, modules));
  };
  const double none = retained({});
  CHECK(none - retained({"moe_act"}) == 10240);                    // 2f a row, 10 rows
  CHECK(none - retained({"shared_experts"}) == 2048 + 1024 + 4096 + 2);
  CHECK(none - retained({"layernorm"}) == 4096);                   // te: the MoE pre-norm alone
  // All of the layer below m_y but the dispatcher's attributes, probs and map.
  CHECK(none - retained({"moe"}) == 40 + 160 + 2048 + 4100 + 71720 + 7170);
  CHECK(retained({"moe", "moe_act"}) == retained({"moe"}));
  CHECK(retained({"moe", "shared_experts"}) == retained({"moe"}));
  CHECK(retained({"moe"}) - retained({"moe", "layernorm"}) == 4096); // m_y too: only the residual stays
  CHECK(retained({"mlp"}) == none);
}

TEST_CASE("dispatcher attributes outlive the forward pass of a recomputed MoE") {
  const config::Model m = reference_model();
  const Traced t = whole_layer(m, one_gpu(Build::Te), LayerKind::Gdn, MlpKind::Moe, {"moe"});
  const program::UnitSummary s = program::summarise(t.trace);
  // probs and map, 5 E bytes a token, until the layer's next forward; nothing else keeps them.
  CategoryBytes alone, again, held;
  for (const program::Attribute& a : s.attributes) {
    alone += a.forward.after;
    again += a.backward.after; // the replay binds new ones
    held += a.held;
  }
  CHECK(alone.total() == 512 * 5 * 8192);
  CHECK(again.total() == alone.total());
  CHECK(held.total() == 0);
  // Without recompute its own backward keeps them anyway.
  for (const program::Attribute& a :
       program::summarise(whole_layer(m, one_gpu(Build::Te), LayerKind::Gdn, MlpKind::Moe).trace).attributes)
    CHECK(a.held.total() > 0);
}

TEST_CASE("a listed module that lies inside another costs its replay again") {
  const config::Model m = reference_model();
  auto replays = [&](const Modules& modules) {
    const Traced t = whole_layer(m, one_gpu(Build::Te), LayerKind::Gdn, MlpKind::Moe, modules);
    int n = 0;
    for (const program::Event& e : t.trace.events)
      n += e.pass == program::Pass::Replay && t.list.ops[static_cast<size_t>(e.op)].name == "expert_act";
    return n;
  };
  CHECK(replays({"moe"}) == 1);
  CHECK(replays({"moe_act"}) == 1);
  CHECK(replays({"moe", "moe_act"}) == 2);
}

// ------------------------------------------------------------------------- dense MLP, norms ----

TEST_CASE("dense SwiGLU MLP: kept, and freed by mlp") {
  config::Model m = reference_model(); // ffn 5120
  for (auto [build, norm] : {std::pair{Build::Te, 4100}, {Build::Local, 0}}) {
    const Traced t = module_alone(m, one_gpu(build), "mlp");
    CHECK(retained_per_token(t) == 4096 + norm + 4 * 5120 + 2 * 5120);
    CHECK(retained_per_token(module_alone(m, one_gpu(build), "mlp", {"mlp"})) == 4096);
  }
}

TEST_CASE("dense GPT, 48 layers: recomputing both norms frees their outputs to the byte") {
  config::Model m;
  m.name = "gpt";
  m.hidden = 1600;
  m.ffn = 6400;
  m.attention = {.heads = 25, .kv_heads = 25, .head_dim = 64, .output_gate = false, .qk_norm = false};
  config::Run run = one_gpu(Build::Local, "main", 1024);
  run.micro_batch = 32;
  auto retained = [&](const Modules& modules) {
    return whole_layer(m, run, LayerKind::Attention, MlpKind::Dense, modules).levels.retained;
  };
  CHECK(48 * (retained({}) - retained({"layernorm"})) == Bytes{9600} * kMiB);
}

TEST_CASE("hidden dropout keeps one byte an element at both residual adds") {
  config::Run run = one_gpu(Build::Te);
  const Traced none = whole_layer(reference_model(), run, LayerKind::Gdn, MlpKind::Moe);
  run.hidden_dropout = 0.1;
  CHECK(retained_per_token(whole_layer(reference_model(), run, LayerKind::Gdn, MlpKind::Moe)) - retained_per_token(none) == 2 * 2048);
}

// ------------------------------------------------------------------------------ whole layers ----

TEST_CASE("whole layers are their modules plus the residual stream and the MoE pre-norm") {
  const config::Model m = reference_model();
  for (Build build : {Build::Te, Build::Local})
    for (const char* mixer : {"gdn", "gdn2", "attention"})
      for (const char* mlp : {"moe", "mlp"}) {
        CAPTURE(mixer);
        CAPTURE(mlp);
        const LayerKind kind = std::string(mixer) == "gdn" ? LayerKind::Gdn : std::string(mixer) == "gdn2" ? LayerKind::Gdn2 : LayerKind::Attention;
        const MlpKind feed = std::string(mlp) == "moe" ? MlpKind::Moe : MlpKind::Dense;
        const config::Run run = one_gpu(build);
        const double layer = retained_per_token(whole_layer(m, run, kind, feed));
        const double parts = retained_per_token(module_alone(m, run, mixer)) + retained_per_token(module_alone(m, run, mlp));
        // A separate norm adds its input and statistic; its output is the module's input.
        const bool separate_mixer = build == Build::Local, separate_mlp = build == Build::Local || feed == MlpKind::Moe;
        CHECK(layer == parts + (separate_mixer ? 4100 : 0) + (separate_mlp ? 4100 : 0));
      }
}

TEST_CASE("retained bytes of a layer never rise when a module is added, whatever the others are") {
  const config::Model m = reference_model();
  const Modules all{"core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts", "gdn_norm_out", "gdn_qkv"};
  for (auto [mixer, mlp] : {std::pair{LayerKind::Gdn, MlpKind::Moe}, {LayerKind::Attention, MlpKind::Moe}, {LayerKind::Gdn, MlpKind::Dense}}) {
    std::vector<Bytes> retained;
    for (size_t set = 0; set < (1u << all.size()); ++set) {
      Modules chosen;
      for (size_t i = 0; i < all.size(); ++i)
        if (set >> i & 1) chosen.push_back(all[i]);
      retained.push_back(whole_layer(m, one_gpu(Build::Local, "main+gdn_qkv", 256), mixer, mlp, chosen).levels.retained);
      for (size_t i = 0; i < all.size(); ++i)
        if (set >> i & 1) CHECK(retained[set] <= retained[set & ~(size_t{1} << i)]);
    }
  }
}

TEST_CASE("an estimator that knows no MoE is wrong by more than three times") {
  // The legacy formula gives h (18 + 4 ffn / h) = 57,344 bytes a token and layer for Qwen3-Next-80B-A3B.
  config::Model m = reference_model();
  const config::Run run = one_gpu(Build::Te, "main", 4096);
  auto average = [&](const config::Model& model) {
    return (36 * retained_per_token(whole_layer(model, run, LayerKind::Gdn, MlpKind::Moe)) +
            12 * retained_per_token(whole_layer(model, run, LayerKind::Attention, MlpKind::Moe))) / 48;
  };
  const double base = average(m);
  CHECK(base > 3 * 57344);
  for (auto edit : {+[](config::Model& c) { c.moe.top_k = 8; }, +[](config::Model& c) { c.moe.ffn = 768; },
                    +[](config::Model& c) { c.moe.shared_ffn = 1024; }}) {
    config::Model changed = m;
    edit(changed);
    CHECK(average(changed) != base);
  }
}

TEST_CASE("output-norm saving: 128 MiB a GDN layer, the rest on lines of its own") {
  config::Run run = one_gpu(Build::Te);
  run.micro_batch = 2; // 16,384 tokens
  for (auto [build, more] : {std::pair{Build::Local, 2}, {Build::Te, 130}}) {
    run.build = build;
    const Traced none = whole_layer(reference_model(), run, LayerKind::Gdn, MlpKind::Moe);
    CHECK(none.list.storage_of(none.list.find_tensor("norm_out_hp")).bytes == 128 * kMiB);
    const Bytes freed = none.levels.retained - whole_layer(reference_model(), run, LayerKind::Gdn, MlpKind::Moe, {"gdn_norm_out"}).levels.retained;
    CHECK(freed == (128 + more) * kMiB); // statistic 2 MiB; te: the normalised value too
    CHECK(whole_layer(reference_model(), run, LayerKind::Attention, MlpKind::Moe, {"gdn_norm_out"}).levels.retained ==
          whole_layer(reference_model(), run, LayerKind::Attention, MlpKind::Moe).levels.retained);
  }
}

TEST_CASE("q/k/v preparation: what each kind of gdn_qkv frees, by who owns the norm") {
  config::Run run = one_gpu(Build::Te, "main+gdn_qkv+l2norm_kernel");
  run.micro_batch = 2;
  auto freed = [&](config::L2Norm owner, const char* module) {
    run.l2norm = owner;
    auto kept = [&](const Modules& modules) {
      const Traced t = module_alone(reference_model(), run, "gdn", modules);
      Bytes bytes = 0;
      for (const program::Buffer& b : t.trace.buffers) {
        const bool crosses = !b.gradient && b.generation == 0 && b.last >= t.trace.forward_end && b.drop < 0;
        const std::string& name = t.list.tensor(b.tensor).name;
        if (crosses && (name == "qk_norm" || name == "q" || name == "k" || name == "v" || name == "q_hat" || name == "k_hat"))
          bytes += b.bytes;
      }
      return bytes;
    };
    return mib(kept({}) - kept({module}));
  };
  CHECK(freed(config::L2Norm::Caller, "gdn_qkv:discard") == 512);
  CHECK(freed(config::L2Norm::Kernel, "gdn_qkv:discard") == 128);
  CHECK(freed(config::L2Norm::Caller, "gdn_qkv") == 128);
  CHECK(freed(config::L2Norm::Kernel, "gdn_qkv") == 0);
}

TEST_CASE("nested and useless names") {
  const config::Model m = reference_model();
  const config::Run run = one_gpu(Build::Te);
  auto model_retained = [&](const Modules& modules) {
    return 36 * retained_per_token(whole_layer(m, run, LayerKind::Gdn, MlpKind::Moe, modules)) +
           12 * retained_per_token(whole_layer(m, run, LayerKind::Attention, MlpKind::Moe, modules));
  };
  CHECK(model_retained({"core_attn", "moe", "moe_act", "mlp"}) == doctest::Approx(model_retained({"moe"})).epsilon(0.01));
  CHECK(model_retained({"layernorm", "moe", "moe_act"}) == model_retained({"layernorm", "moe"}));
  const model::OpList gdn = model::megatron::decoder_layer(m, run, LayerKind::Gdn, MlpKind::Moe);
  const model::OpList attention = model::megatron::decoder_layer(m, run, LayerKind::Attention, MlpKind::Moe);
  for (const char* inert : {"mlp", "core_attn"}) CHECK(!model::acts_on(inert, gdn, "megatron"));
  CHECK(!model::acts_on("mlp", attention, "megatron"));
  CHECK(model::acts_on("core_attn", attention, "megatron"));
  for (const char* hybrid : {"mhc", "gdp_qkv", "gdp_in_proj", "mla_up_proj"})
    CHECK((!model::acts_on(hybrid, gdn, "megatron") && !model::acts_on(hybrid, attention, "megatron")));
}

TEST_CASE("replay of an MoE layer is the backward peak, and it scales with the tokens") {
  auto peak = [&](std::int64_t tokens) {
    model::OpList layer = model::megatron::decoder_layer(reference_model(), one_gpu(Build::Te, "main", tokens), LayerKind::Gdn, MlpKind::Moe);
    const std::vector<model::Span> full{{"full", 0, static_cast<int>(layer.ops.size()) - 1}};
    const program::Levels l = traced(std::move(layer), full, false).levels;
    CHECK(l.retained == (4096 + 5 * 512) * tokens); // the hidden state, and the dispatcher's attributes
    // Permuted input, FC1 output, activation, FC2 output at least, and gradients beside them.
    CHECK(std::max(l.backward.bytes, l.replay.bytes) > (2 * 40960 + 20480 + 10240) * tokens + (40960 + 20480) * tokens);
    return std::max(l.backward.bytes, l.replay.bytes);
  };
  CHECK(static_cast<double>(peak(65536)) / static_cast<double>(peak(16384)) == doctest::Approx(4).epsilon(0.02));
}

TEST_CASE("modules act on every layer of a list that holds several") {
  const config::Model m = reference_model();
  config::Model with_mtp = m;
  with_mtp.mtp_layers = 2;
  const model::OpList head = model::megatron::head_unit(with_mtp, one_gpu(Build::Te));
  const auto spans = model::spans_for(head, {"moe", "layernorm", "core_attn"}, {}, "megatron");
  CHECK(spans.size() == 6);
  for (const model::Span& s : spans) CHECK(head.ops[static_cast<size_t>(s.first)].name.starts_with("mtp"));
}

TEST_CASE("an unknown module name or a layer without an op list is an error") {
  CHECK_THROWS_AS(model::megatron::module_list(reference_model(), one_gpu(Build::Te), "gnd"), Error);
  config::Model m = reference_model();
  m.unmodelled_kind = "KDA";
  CHECK_THROWS_AS(model::megatron::decoder_layer(m, one_gpu(Build::Te), LayerKind::Unmodelled, MlpKind::Moe), Error);
}
