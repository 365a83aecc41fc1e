#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "config/profiles.h"
#include "config/run_io.h"
#include "core/error.h"
#include "plan/plan.h"

using namespace gdn;

// Situations that people reported in public, with the answer they should have had.
namespace {

struct UserCase {
  config::ModelProfile profile;
  config::Hardware hardware;

  UserCase(const char* model, const char* gpu, std::vector<config::Setting> settings)
      : profile(config::Profiles().model(model, settings)), hardware(config::Profiles().hardware(gpu)) {}

  plan::Estimate estimate(plan::Setting s) {
    plan::Estimator e(profile.model, profile.run, hardware);
    return e.evaluate(s);
  }
  std::vector<plan::Notice> notices(plan::Setting s) {
    plan::Workload w(profile.model, profile.run, model::upstream_provider());
    return plan::setting_notices(w, s);
  }
};

plan::Setting selective(std::vector<std::string> modules) {
  plan::Setting s;
  s.granularity = config::Granularity::Selective;
  s.modules = std::move(modules);
  return s;
}

plan::Setting full(const char* method, std::int64_t layers) {
  plan::Setting s;
  s.granularity = config::Granularity::Full;
  s.method = method;
  s.num_layers = layers;
  return s;
}

std::vector<config::Setting> one_rank(std::int64_t seq) {
  return {{"gpus", "1"}, {"expert_model_parallel_size", "1"}, {"pipeline_model_parallel_size", "1"}, {"micro_batch_size", "1"},
          {"global_batch_size", "1"}, {"seq_length", std::to_string(seq)}, {"train_mtp", "false"}, {"vision", "absent"}};
}

bool has(const std::vector<plan::Notice>& notices, const std::string& key) {
  return std::any_of(notices.begin(), notices.end(), [&](const plan::Notice& n) { return n.key == key; });
}

} // namespace

TEST_CASE("UC-05: uniform N stores L/N inputs of 2h bytes a token, and N = 1 has the lowest peak") {
  UserCase c("qwen3-next-80b-a3b", "h200", one_rank(4096));
  plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
  Bytes previous = 0;
  for (std::int64_t n : {1, 2, 4, 8}) {
    CAPTURE(n);
    Bytes stored = 0; // of the decoder layers
    for (const plan::LayerEstimate& l : e.layers(full("uniform", n)))
      if (l.index >= 0) stored += l.retained;
    CHECK(stored / 4096 == 48 / n * 4096);
    const Bytes replay = e.evaluate(full("uniform", n)).worst_rank().replay_peak;
    CHECK(replay > previous);
    previous = replay;
  }
  // block, 1 recomputes one layer only: near the figure without recompute.
  const Bytes none = e.evaluate({}).peak_bytes, block = e.evaluate(full("block", 1)).peak_bytes;
  CHECK(block < none);
  CHECK(static_cast<double>(none - block) < 0.05 * static_cast<double>(none));
}

TEST_CASE("UC-06: the replay of a MoE layer is the peak of the layers, and grows with the tokens") {
  auto replay = [](std::int64_t tokens) {
    std::vector<config::Setting> settings = one_rank(tokens);
    UserCase c("qwen3.5-35b-a3b", "h200", settings);
    c.profile.run.cross_entropy = config::CrossEntropy::ChunkedLinear;
    c.profile.run.loss_chunk = 1024;
    const plan::Estimate e = c.estimate(full("uniform", 1));
    const plan::RankEstimate& w = e.worst_rank();
    CHECK(w.peak_phase != "loss");
    CHECK(w.peak_phase != "forward");
    CHECK(w.peak_event.find("+moe") != std::string::npos);
    // The transient: the peak above static state, what libraries hold and stored inputs.
    Bytes library = 0;
    for (const model::LibraryBuffer& b : w.library) library += b.bytes;
    return w.peak.bytes - w.state.total() - library - w.retained_per_micro_batch;
  };
  const Bytes small = replay(16384), large = replay(65536);
  // Permuted input, FC1 output, activation and FC2 output, in bf16: 2h + 4f + 2f + 2h a row, 8 rows a token.
  CHECK(small >= Bytes{16384} * 8 * (2 * 2048 + 4 * 512 + 2 * 512 + 2 * 2048));
  CHECK(static_cast<double>(large) / static_cast<double>(small) == doctest::Approx(4).epsilon(0.02));
}

TEST_CASE("UC-10: nested and useless names are noticed, one notice a name") {
  UserCase c("qwen3-next-80b-a3b", "h200", {});
  auto a = c.notices(selective({"core_attn", "moe", "moe_act", "mlp"}));
  CHECK(has(a, "nested.moe_act"));
  CHECK(has(a, "inert.mlp"));
  CHECK(has(a, "inert.core_attn"));
  CHECK(has(a, "untouched.gdn"));
  CHECK(a.size() == 4);
  for (const plan::Notice& n : a) {
    if (n.key == "inert.core_attn") CHECK(n.text.find("12 of 48 layers") != std::string::npos);
    if (n.key == "untouched.gdn") CHECK(n.text.find("36 GDN") != std::string::npos);
  }
  auto b = c.notices(selective({"layernorm", "moe", "moe_act"}));
  CHECK(b.size() == 1);
  CHECK(has(b, "nested.moe_act"));
  auto d = c.notices(selective({"core_attn", "gdn_norm_out", "moe_act"}));
  CHECK(d.size() == 1);
  CHECK(has(d, "inert.core_attn"));
  // The retained bytes of a are those of [moe], of b those of [layernorm, moe].
  plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
  auto retained = [&](std::vector<std::string> modules) {
    return static_cast<double>(e.evaluate(selective(std::move(modules))).ranks[0].retained_per_micro_batch);
  };
  CHECK(retained({"core_attn", "moe", "moe_act", "mlp"}) == doctest::Approx(retained({"moe"})).epsilon(0.01));
  CHECK(retained({"layernorm", "moe", "moe_act"}) == retained({"layernorm", "moe"}));
}

TEST_CASE("UC-12: fits by capacity, allocated and reserved apart, advice in the right order") {
  UserCase c("qwen3.5-35b-a3b", "h200", {});
  plan::Estimator roomy(c.profile.model, c.profile.run, c.hardware);
  const plan::Estimate e = roomy.evaluate({});
  // 75 % of the card allocated: the same advice for any plan there.
  plan::Estimator tight(c.profile.model, c.profile.run, c.hardware, static_cast<Bytes>(static_cast<double>(e.peak_bytes) / 0.75));
  const plan::Estimate t = tight.evaluate({});
  CHECK(t.fits);
  CHECK(t.allocator_bytes > 0);
  CHECK(t.total_bytes > t.peak_bytes);
  auto notice = plan::fragmentation_notice(t);
  CHECK(notice.has_value());
  const size_t allocator = notice->text.find("expandable_segments"), modules = notice->text.find("selective modules"),
               parallelism = notice->text.find("parallelism");
  CHECK(allocator < modules);
  CHECK(modules < parallelism);
  CHECK(notice->text.find("virtual") == std::string::npos);
  plan::Estimator wide(c.profile.model, c.profile.run, c.hardware, e.peak_bytes * 2);
  CHECK(!plan::fragmentation_notice(wide.evaluate({})).has_value());
}

TEST_CASE("UC-13: stage i keeps min(m, PP - i) micro-batches") {
  for (auto [micro_batches, expected] : {std::pair{16, std::vector<std::int64_t>{4, 3, 2, 1}}, {2, {2, 2, 2, 1}}}) {
    UserCase c("qwen3-next-80b-a3b", "h200",
           {{"gpus", "4"}, {"pipeline_model_parallel_size", "4"}, {"expert_model_parallel_size", "1"}, {"micro_batch_size", "1"},
            {"global_batch_size", std::to_string(micro_batches)}, {"train_mtp", "false"}});
    for (const plan::Setting& s : {plan::Setting{}, full("uniform", 1)}) {
      const plan::Estimate e = c.estimate(s);
      for (size_t r = 0; r < 4; ++r) CHECK(e.ranks[r].in_flight == expected[r]);
      // Twelve layers of the same mix on every stage; the ends add the embedding's ids and the loss.
      CHECK(e.ranks[1].retained_per_micro_batch == e.ranks[2].retained_per_micro_batch);
      CHECK(e.ranks[0].retained_per_micro_batch - e.ranks[1].retained_per_micro_batch == 8 * c.profile.run.seq);
    }
  }
}

TEST_CASE("every default run plans, and its proposal is legal and fits") {
  for (const auto& listed : config::Profiles().models()) {
    CAPTURE(listed.name);
    const config::ModelProfile p = config::Profiles().model(listed.name);
    if (p.model.parameters_only) {
      CHECK_THROWS_AS(plan::make_plan(p.model, p.run, config::Profiles().hardware(p.hardware)), Error);
      continue;
    }
    const plan::Plan plan = plan::make_plan(p.model, p.run, config::Profiles().hardware(p.hardware));
    CHECK(plan.proposal.has_value());
    // More recompute never raises what a layer keeps; the peak may rise and is never assumed not to.
    for (const plan::Candidate& c : plan.candidates) CHECK(c.estimate.step_seconds > 0);
  }
}
