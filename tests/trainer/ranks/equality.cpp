#include "tests/trainer/ranks/equality.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <fmt/core.h>

#include "config/profiles.h"
#include "config/yaml.h"
#include "tests/trainer/ranks/gradients.h"
#include "trainer/prediction.h"

namespace gdn::trainer::ranks_test {

namespace {

World* the_world = nullptr;

constexpr int kSteps = 5;

struct Step {
  StepResult result;
  double norm = 0;
  Gradients gradients = {};
};

std::vector<Batch> batches_of(const Case& c, std::uint64_t step) {
  config::Run whole = c.run;
  whole.parallel = {};
  std::vector<Batch> all = fixture::batches(c.model, whole, step + 1);
  if (c.edit) c.edit(all);
  return all;
}

std::vector<Step> train(Session& session, const Case& c) {
  const Ranks& ranks = session.ranks();
  const auto data_ranks = static_cast<size_t>(ranks.topology().parallel().dp());
  session.parameters().initialise(7);
  if (c.prepare) c.prepare(session.parameters());
  std::vector<Step> steps;
  for (int i = 0; i < kSteps; ++i) {
    const std::vector<Batch> all = batches_of(c, static_cast<std::uint64_t>(i));
    std::vector<Batch> mine;
    for (size_t m = static_cast<size_t>(ranks.place().dp); m < all.size(); m += data_ranks) mine.push_back(all[m]);
    Step s{session.run(mine, static_cast<std::uint64_t>(i), 7)};
    if (i == 0 || i + 1 == kSteps) s.gradients = gradients_of(session.parameters());
    UpdateSettings u;
    u.lr = 1e-3;
    u.clip = 1;
    u.step = i + 1;
    s.norm = session.parameters().update(u);
    steps.push_back(std::move(s));
  }
  return steps;
}

// The same on one rank; made once for all layouts of a run.
std::vector<Step> one_rank(Device& device, const Case& c) {
  static std::map<std::string, std::vector<Step>> made;
  config::ModelProfile profile;
  profile.model = c.model;
  profile.run = c.run;
  profile.run.parallel = {};
  const std::string key = config::to_yaml(config::to_node(profile));
  if (const auto known = made.find(key); known != made.end() && !c.edit && !c.prepare) return known->second;
  Session one(profile.model, profile.run, device);
  one.use(fixture::modules({}));
  std::vector<Step> steps = train(one, c);
  if (!c.edit && !c.prepare) made[key] = steps;
  return steps;
}

} // namespace

void set_world(World& world) { the_world = &world; }
World& world() { return *the_world; }

config::Model small(std::vector<config::LayerKind> mixers, std::vector<config::MlpKind> mlps) {
  config::Model m = fixture::model(std::move(mixers), std::move(mlps));
  m.gdn.key_heads = 4;
  m.gdn.value_heads = 8;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 8;
  m.attention.head_dim = 8;
  m.moe.aux_loss_coeff = 0.01;
  m.moe.z_loss_coeff = 0.001;
  return m;
}

config::Run run_of(std::string stack, config::Parallel parallel, std::int64_t micro_batches_of_all) {
  config::Run r = fixture::run(micro_batches_of_all);
  r.stack = std::move(stack);
  r.dtype = DType::FP32;
  r.vocab_divisor = 0;     // the vocabulary is padded to the same size in every layout
  r.moe_imbalance = 2;     // no more can arrive with two expert ranks
  r.cp_comm_type = "all_gather";
  r.parallel = parallel;
  return r;
}

void check_equal(const Case& c) {
  CpuDevice device;
  const std::vector<Step> expected = one_rank(device, c);
  const Ranks ranks(world(), c.run.parallel);
  Session many(c.model, c.run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
  many.use(fixture::modules(c.modules));
  const Prediction predicted = predict(many.workload(), fixture::modules(c.modules), many.program(), ranks.place().pp);
  const std::vector<Step> actual = train(many, c);

  double worst = 0, worst_loss = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Step &e = expected[i], &a = actual[i];
    CAPTURE(i);
    worst_loss = std::max(worst_loss, std::abs(a.result.loss - e.result.loss));
    CHECK(std::abs(a.result.loss - e.result.loss) < c.loss_tolerance);
    CHECK(std::abs(a.result.mtp_loss - e.result.mtp_loss) < c.loss_tolerance);
    CHECK(std::abs(a.result.aux_loss - e.result.aux_loss) < c.loss_tolerance);
    CHECK(std::abs(a.norm - e.norm) < c.gradient_tolerance * e.norm);
    if (i == 0) CHECK(a.result.expert_load == e.result.expert_load);
    CHECK(a.result.valid == e.result.valid);
    CHECK(a.result.tokens == e.result.tokens);
    CHECK(a.result.peak.bytes == predicted.peak_bytes);
    CHECK(a.result.peak.by == predicted.at_peak);
    for (const auto& [name, gradient] : a.gradients) {
      CAPTURE(name);
      const auto whole = std::find_if(e.gradients.begin(), e.gradients.end(), [&, n = name](const auto& g) { return g.first == n; });
      REQUIRE(whole != e.gradients.end());
      const auto held = held_stretches(*many.parameters().at(name).parameter, c.run.parallel, ranks.place());
      REQUIRE(part_of(whole->second, held).size() == gradient.size());
      const double off = distance(gradient, whole->second, held, e.norm, 1e-4, 1e-7);
      worst = std::max(worst, off);
      CHECK(off <= c.gradient_tolerance);
    }
  }
  CHECK(expected.back().result.loss < expected.front().result.loss + 0.5); // it computes something finite
  if (const char* tell = std::getenv("GDN_TELL"); tell && world().rank() == 0)
    fmt::print("  loss {:.6f}: off by {:.1e}; gradients off by {:.1e}; peak {} bytes\n", expected.back().result.loss, worst_loss, worst, predicted.peak_bytes);
}

config::Model hybrid() {
  return small({config::LayerKind::Gdn, config::LayerKind::Attention}, {config::MlpKind::Moe, config::MlpKind::Moe});
}

Case packed(config::Model model, config::Run run) {
  run.settings.packed = true;
  Case c{std::move(model), std::move(run)};
  c.edit = [](std::vector<Batch>& batches) {
    for (size_t i = 0; i < batches.size(); ++i)
      batches[i].sequences = i % 2 == 0 ? std::vector<std::int64_t>{0, 7, 20, 33, 34, 61, 80} : std::vector<std::int64_t>{0, 59, 80};
  };
  return c;
}

} // namespace gdn::trainer::ranks_test
