#include <doctest/doctest.h>

#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;

namespace {

// Without the module's input, 2h = 4,096 B/token, which is the caller's.
double beyond_input(const Traced& t) { return retained_per_token(t) - 4096; }

double gdn_retained(Build build, const std::string& revision, const std::vector<std::string>& modules,
                    config::L2Norm l2norm = config::L2Norm::Caller) {
  config::Run run = one_gpu(build, revision);
  run.l2norm = l2norm;
  return beyond_input(module_alone(reference_model(), run, "gdn", modules));
}

} // namespace

TEST_CASE("GDN module: retained bytes per token of both builds, for every module") {
  struct Row {
    std::vector<std::string> modules;
    double local, te;
  };
  const Row rows[] = {{{}, 86592, 98884},
                      {{"gdn_norm_out"}, 78272, 82372},
                      {{"gdn_qkv"}, 53568, 61760},
                      {{"gdn_qkv", "gdn_norm_out"}, 45248, 45248},
                      {{"gdn_qkv:discard"}, 20736, 28928},
                      {{"gdn_qkv:discard", "gdn_norm_out"}, 12416, 12416},
                      {{"gdn"}, 0, 0}};
  for (const Row& row : rows) {
    CAPTURE(row.modules);
    CHECK(gdn_retained(Build::Local, "main+gdn_qkv", row.modules) == row.local);
    CHECK(gdn_retained(Build::Te, "main+gdn_qkv", row.modules) == row.te);
  }
}

TEST_CASE("gdn_in_proj_conv frees the projection only where the gates were given copies") {
  // ln_out and its statistic 2h + 4 = 4,100; the projection 2D = 24,704; the two copies 4Hv = 128.
  const std::string copies = "main+gdn_in_proj_conv", views = "main+gate_views+gdn_in_proj_conv";
  CHECK(gdn_retained(Build::Te, copies, {}) == 98884 + 128);
  CHECK(gdn_retained(Build::Te, copies, {"gdn_in_proj_conv"}) == 98884 + 128 - 4100 - 24704);
  CHECK(gdn_retained(Build::Te, views, {}) == 98884);
  CHECK(gdn_retained(Build::Te, views, {"gdn_in_proj_conv"}) == 98884 - 4100);
}

TEST_CASE("L2 norm folded into the rule kernel") {
  const std::string revision = "main+gdn_qkv+l2norm_kernel";
  auto local = [&](const std::vector<std::string>& modules) {
    return gdn_retained(Build::Local, revision, modules, config::L2Norm::Kernel);
  };
  CHECK(local({}) == 78528);
  CHECK(local({"gdn_qkv"}) == 53824);
  CHECK(local({"gdn_qkv:discard"}) == 37376);
  // It lowers what is kept without gdn_qkv by 8,064 and raises it with gdn_qkv by 8Hv.
  CHECK(gdn_retained(Build::Local, revision, {}) - local({}) == 8064);
  CHECK(local({"gdn_qkv"}) - gdn_retained(Build::Local, revision, {"gdn_qkv"}) == 256);
  // Nobody normalises: the normalised q|k and its statistic are gone, nothing takes their place.
  CHECK(gdn_retained(Build::Local, revision, {}, config::L2Norm::Off) == 86592 - 8192 - 128);
}

TEST_CASE("L2 norm folded: peaks move by the copies the kernel makes") {
  config::Run caller = one_gpu(Build::Local, "main+gdn_qkv+l2norm_kernel"), kernel = caller;
  kernel.l2norm = config::L2Norm::Kernel;
  auto change = [&](const std::vector<std::string>& modules, bool backward) {
    auto peak = [&](const config::Run& run) {
      const program::Levels l = module_alone(reference_model(), run, "gdn", modules).levels;
      return backward ? std::max(l.backward.bytes, l.replay.bytes) : l.forward.bytes;
    };
    return static_cast<double>(peak(kernel) - peak(caller)) / 8192;
  };
  // 4 Hv dk + 8 Hv - 4 QK - 8 Hk forward, 8 Hv - 4 QK - 8 Hk backward; under gdn_qkv without the -4 QK - 8 Hk.
  CHECK(change({}, false) == 16384 + 256 - 8192 - 128);
  CHECK(change({}, true) == 256 - 8192 - 128);
  CHECK(change({"gdn_qkv"}, false) == 16384 + 256);
  CHECK(change({"gdn_qkv"}, true) == 256);
}

namespace {

// Highest level among the runs of one op or step in a pass, bytes a token.
double level_at(const Traced& t, const std::string& op, int step, program::Pass pass) {
  Bytes high = 0;
  for (size_t e = 0; e < t.trace.events.size(); ++e) {
    const program::Event& event = t.trace.events[e];
    if (t.list.ops[static_cast<size_t>(event.op)].name == op && event.step == step && event.pass == pass)
      high = std::max(high, t.levels.at_event[e]);
  }
  return static_cast<double>(high) / static_cast<double>(t.list.tokens);
}

} // namespace

TEST_CASE("workspace of the rule, forward and backward") {
  const model::OpList list = model::megatron::module_list(reference_model(), one_gpu(Build::Local), "gdn");
  const model::Op& rule = list.ops[static_cast<size_t>(list.find_op("rule"))];
  CHECK(model::upstream_provider().work(list, rule, -1).scratch == 40960 * 8192);
  // W_b = 106,816 holds the gradients too: d:q, d:k, d:v, d:g, d:beta are tensors of the program.
  Bytes gradients = 0;
  for (model::TensorId t : rule.inputs) gradients += list.tensor(t).bytes();
  CHECK(model::upstream_provider().work(list, rule, 0).scratch + gradients == Bytes{106816} * 8192);
  // Packed or short sequences start new chunks: 16 sequences of 100 tokens have 32 chunks, not 25.
  config::Run run = one_gpu(Build::Local, "main", 100);
  run.micro_batch = 16;
  const model::OpList shorts = model::megatron::module_list(reference_model(), run, "gdn");
  CHECK(model::upstream_provider().work(shorts, shorts.ops[static_cast<size_t>(shorts.find_op("rule"))], -1).scratch ==
        1600 * (2 * 4096 + 4 * 4096) + 32 * 2 * 32 * 128 * 128);
}

TEST_CASE("te: peaks are the local ones plus the fused norm's output") {
  auto peaks = [&](Build build, const std::vector<std::string>& modules) {
    return module_alone(reference_model(), one_gpu(build, "main+gdn_qkv"), "gdn", modules).levels;
  };
  for (bool backward : {false, true}) {
    auto of = [&](Build build) {
      program::Levels l = peaks(build, {});
      return static_cast<double>(backward ? l.backward.bytes : l.forward.bytes) / 8192;
    };
    CHECK(of(Build::Te) - of(Build::Local) == 4100);
  }
  // gdn_norm_out changes neither.
  CHECK(peaks(Build::Te, {"gdn_norm_out"}).forward.bytes == peaks(Build::Te, {}).forward.bytes);
  CHECK(peaks(Build::Te, {"gdn_norm_out"}).backward.bytes == peaks(Build::Te, {}).backward.bytes);
}

TEST_CASE("replay of gdn_qkv, and the higher backward peak of its discard form") {
  const config::Run run = one_gpu(Build::Local, "main+gdn_qkv");
  Traced whole = module_alone(reference_model(), run, "gdn", {"gdn_qkv"});
  // Six output gradients, six new outputs, the replayed saved set, the convolution output.
  CHECK(level_at(whole, "gates", -1, program::Pass::Replay) == 119424);
  CHECK(level_at(whole, "l2norm", -1, program::Pass::Replay) <= 119424 + 8192);
  CHECK(level_at(whole, "rule", 0, program::Pass::Backward) == 156160);
  Traced none = module_alone(reference_model(), run, "gdn");
  Traced discard = module_alone(reference_model(), run, "gdn", {"gdn_qkv:discard"});
  CHECK(level_at(none, "rule", 0, program::Pass::Backward) == 189184);
  CHECK(level_at(discard, "rule", 0, program::Pass::Backward) == 197504);
  CHECK(discard.levels.backward.bytes > none.levels.backward.bytes);
  CHECK(discard.levels.retained < whole.levels.retained);
  CHECK(whole.levels.retained < none.levels.retained);
}

TEST_CASE("gdn_norm_out: outputs and internals come back at the hook") {
  for (auto [build, more] : {std::pair{Build::Local, 8320}, {Build::Te, 16512}}) {
    Traced t = module_alone(reference_model(), one_gpu(build), "gdn", {"gdn_norm_out"});
    // retained + output of the module + what came back, when out_proj's backward starts.
    const double start = level_at(t, "out_proj", 0, program::Pass::Backward);
    CHECK(start == retained_per_token(t) - 4096 + 4096 + more + 8192); // and d:norm_out
  }
}

TEST_CASE("scaling: head part by tp * cp, hidden part by sequence parallelism") {
  auto local_bytes = [&](std::int64_t tp, std::int64_t cp, bool sp, std::int64_t seq) {
    config::Run run = one_gpu(Build::Te, "main", seq);
    run.parallel.tp = tp;
    run.parallel.cp = cp;
    run.parallel.sequence_parallel = sp;
    run.parallel.gpus = tp * cp;
    const Traced t = module_alone(reference_model(), run, "gdn");
    return static_cast<double>(t.levels.retained);
  };
  const double one = local_bytes(1, 1, false, 8192);
  CHECK(one == 102980.0 * 8192); // with x
  CHECK(local_bytes(2, 2, true, 8192) == one / 4);
  // Without SP the hidden part (x, ln_out, statistic) is divided by cp only.
  const double hidden = 8196.0 * 8192;
  CHECK(local_bytes(2, 1, false, 8192) == (one - hidden) / 2 + hidden);
  CHECK(local_bytes(1, 4, false, 8192) == one / 4);
}

TEST_CASE("context parallelism: two exchanges a layer, again inside a replay, with the full sequence") {
  config::Run run = one_gpu(Build::Te, "main+gdn_qkv");
  run.parallel.cp = 4;
  run.parallel.gpus = 4;
  const Traced t = module_alone(reference_model(), run, "gdn", {"gdn_qkv", "gdn_norm_out"});
  auto moved = [&](const char* op) {
    const model::Op& o = t.list.ops[static_cast<size_t>(t.list.find_op(op))];
    REQUIRE(o.collectives.size() == 1);
    CHECK(o.collectives[0].kind == model::CollectiveKind::AllToAll);
    CHECK(o.collectives[0].group == model::Group::Cp);
    CHECK(o.steps[0].collectives.size() == 1);
    return o.collectives[0].bytes;
  };
  CHECK(moved("cp2hp") == 2 * 12352 * 8192 / 4);
  CHECK(moved("hp2cp") == 2 * 4096 * 8192 / 4);
  const model::Op& rule = t.list.ops[static_cast<size_t>(t.list.find_op("rule"))];
  CHECK(std::get<model::GdnAttr>(rule.attr).chunks == 128); // s/64 whatever cp is
  int replayed = 0;
  for (const program::Event& e : t.trace.events)
    if (e.pass == program::Pass::Replay && t.list.ops[static_cast<size_t>(e.op)].kind == model::OpKind::AllToAll) ++replayed;
  CHECK(replayed == 2);
}

TEST_CASE("deterministic mode keeps the plain rule's intermediates") {
  config::Run run = one_gpu(Build::Local);
  const Traced fast = module_alone(reference_model(), run, "gdn");
  run.deterministic = true;
  const Traced plain = module_alone(reference_model(), run, "gdn");
  double rule = 0;
  for (const char* name : {"rule_substitution", "rule_rows", "rule_blocks", "rule_states"})
    rule += static_cast<double>(plain.list.storage_of(plain.list.find_tensor(name)).bytes) / 8192;
  CHECK(rule == 5460 * 32 + 11 * 16384 + 6 * 8192 + 32768); // 436,864: near 0.44 MB a token
  // Conv input copy and pre-activation, 2C each; q, k, v, beta, g_cum and A of the kernel go.
  CHECK(retained_per_token(plain) - retained_per_token(fast) == rule + 2 * 16384 - (8192 + 8192 + 8192 + 64 + 128 + 4096));
  CHECK(plain.list.find_op("conv1d.transpose") >= 0);
}

TEST_CASE("helpers that run op by op keep their fp32 intermediates") {
  for (auto [build, more] : {std::pair{Build::Te, 6 * 4096 + 8 * 32}, {Build::Local, 8 * 4096 + 8 * 32}}) {
    config::Run run = one_gpu(build);
    const double compiled = retained_per_token(module_alone(reference_model(), run, "gdn"));
    run.settings.compiled = false;
    const Traced eager = module_alone(reference_model(), run, "gdn");
    CHECK(retained_per_token(eager) - compiled == more);
    // The pair of the gates alone is the upper bound given for older trees.
    if (build == Build::Te) CHECK(compiled + bytes_of(eager, "softplus_in") + bytes_of(eager, "softplus_out") == 103236);
  }
  config::Run run = one_gpu(Build::Te);
  const double compiled = retained_per_token(module_alone(reference_model(), run, "attention"));
  run.settings.compiled = false;
  CHECK(retained_per_token(module_alone(reference_model(), run, "attention")) - compiled == 4 * 16 * 256);
}

TEST_CASE("gdn_qkv replays 50.66 of the mixer's 71.63 MFLOP a token, and the SP gather with them") {
  config::Run run = one_gpu(Build::Te, "main+gdn_qkv");
  run.parallel.tp = run.parallel.gpus = 2;
  run.parallel.sequence_parallel = true;
  const Traced t = module_alone(reference_model(), run, "gdn", {"gdn_qkv"});
  double flops = 0;
  std::vector<model::CollectiveKind> collectives;
  for (const program::Event& e : t.trace.events)
    if (e.pass == program::Pass::Replay) {
      const model::Op& op = t.list.ops[static_cast<size_t>(e.op)];
      flops += 2 * op.model_flops / static_cast<double>(t.list.tokens); // both TP ranks
      for (const model::Collective& c : op.collectives) collectives.push_back(c.kind);
    }
  CHECK(flops == 2.0 * (2048 * 12352 + 4 * 8192));
  CHECK(flops / 71630848 * 100 / 3 == doctest::Approx(23.6).epsilon(0.002));
  CHECK(collectives == std::vector{model::CollectiveKind::AllGather});
}

TEST_CASE("convolution bias and whole-module recompute") {
  config::Model m = reference_model();
  m.gdn.conv_bias = m.gdn.bias = true;
  const model::OpList list = model::megatron::module_list(m, one_gpu(Build::Te), "gdn");
  const model::Op& conv = list.ops[static_cast<size_t>(list.find_op("conv1d"))];
  REQUIRE(conv.params.size() == 2);
  CHECK(conv.params[1].name == "gdn.conv1d.bias");
  CHECK(conv.params[1].elements == 8192);
  CHECK(gdn_retained(Build::Te, "dev", {"gdn"}) == 0);
  CHECK(retained_per_token(module_alone(reference_model(), one_gpu(Build::Te), "gdn", {"gdn"})) == 4096); // x alone
}

TEST_CASE("GDN2: wider projection, gates and matrices") {
  config::Run run = one_gpu(Build::Te);
  const double gdn2 = retained_per_token(module_alone(reference_model(), run, "gdn2"));
  // 102,980 of GDN with x, + 53,248 of the kernel + 16,256 of the projection, and GDN's own beta
  // (2 Hv) and cumulative g (4 Hv), which the channel-wise forms replace.
  CHECK(gdn2 == 102980 + 53248 + 16256 - 6 * 32);
  // The caller-side norm stays whoever owns it in GDN.
  run.revision = Revision::parse("main+l2norm_kernel");
  run.l2norm = config::L2Norm::Kernel;
  CHECK(retained_per_token(module_alone(reference_model(), run, "gdn2")) == gdn2);
  // gdn_norm_out applies, with the same bytes; gdn_qkv has no span here.
  CHECK(gdn2 - retained_per_token(module_alone(reference_model(), run, "gdn2", {"gdn_norm_out"})) == 16512);
  CHECK(!model::acts_on("gdn_qkv", model::megatron::module_list(reference_model(), run, "gdn2"), "megatron"));
}
