#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "config/profiles.h"
#include "model/stack_lists.h"
#include "model/validate.h"
#include "plan/bound.h"
#include "plan/halves.h"
#include "plan/search.h"
#include "model/spans.h"

using namespace gdn;

namespace {

struct Space {
  config::ModelProfile profile;
  config::Hardware hardware = config::Profiles().hardware("h100");

  Space(const char* model, std::int64_t gpus, std::int64_t batch, std::vector<config::Setting> more = {})
      : profile(config::Profiles().model(model, settings(gpus, batch, std::move(more)))) {}

  static std::vector<config::Setting> settings(std::int64_t gpus, std::int64_t batch, std::vector<config::Setting> more) {
    more.push_back({"gpus", std::to_string(gpus)});
    more.push_back({"global_batch_size", std::to_string(batch)});
    return more;
  }
};

struct Priced {
  Seconds step;
  Bytes peak, total;
};

// Where the layers do not divide by the pipeline: stages of L / n layers, the L % n in the middle with one more.
std::vector<std::int64_t> uneven(std::int64_t layers, std::int64_t pp, std::int64_t vp) {
  const bool tried = layers % pp != 0 && (vp & (vp - 1)) == 0 && pp * vp <= layers;
  if (!tried) return {};
  std::vector<std::int64_t> out;
  const std::int64_t n = pp * vp, lighter = n - layers % n;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(layers / n + (i >= lighter / 2 && i < lighter / 2 + layers % n));
  return out;
}

// Every layout and setting, priced one by one: sizes from plain loops, legality from the rules alone.
std::vector<Priced> brute_force(const Space& s) {
  std::vector<Priced> out;
  const std::int64_t n = s.profile.run.parallel.gpus, batch = s.profile.run.global_batch;
  for (std::int64_t tp = 1; tp <= n; ++tp)
    for (std::int64_t cp = 1; cp <= n; ++cp)
      for (std::int64_t pp = 1; pp <= n; ++pp)
        for (std::int64_t vp = 1; vp <= s.profile.model.layers(); ++vp)
          for (std::int64_t ep = 1; ep <= n; ++ep)
            for (std::int64_t etp = 1; etp <= n; ++etp)
              for (std::int64_t mbs = 1; mbs <= batch; ++mbs) {
                config::Run run = plan::Setting{}.applied_to(s.profile.run);
                config::Parallel& p = run.parallel;
                p.tp = tp, p.cp = cp, p.pp = pp, p.vp = vp, p.ep = ep, p.etp = etp;
                p.layout = uneven(s.profile.model.layers(), pp, vp);
                p.sequence_parallel = tp > 1;
                run.micro_batch = mbs;
                if (s.profile.model.moe.experts == 0 && ep * etp > 1) continue;
                if (n % (tp * cp * pp) != 0 || p.dp() == 0 || model::any_rejected(model::validate(s.profile.model, run))) continue;
                plan::Estimator estimator(s.profile.model, run, s.hardware);
                for (const plan::Setting& setting : plan::legal_settings(estimator.workload(), false)) {
                  const plan::Estimate e = estimator.evaluate(setting);
                  out.push_back({e.step_seconds, e.peak_bytes, e.total_bytes});
                }
              }
  return out;
}

std::vector<std::pair<Seconds, Bytes>> front_of(std::vector<Priced> all, Bytes budget) {
  std::erase_if(all, [&](const Priced& p) { return p.total > budget; });
  std::sort(all.begin(), all.end(), [](const Priced& a, const Priced& b) { return std::pair(a.step, a.peak) < std::pair(b.step, b.peak); });
  std::vector<std::pair<Seconds, Bytes>> front;
  for (const Priced& p : all)
    if (front.empty() || p.peak < front.back().second) front.emplace_back(p.step, p.peak);
  return front;
}

} // namespace

TEST_CASE("search finds the front that pricing every candidate finds, at any budget") {
  // 1,024 wide over 8,192 tokens: activations and times that the bounds can tell apart, so that they prune.
  const std::vector<config::Setting> wide{{"hidden_size", "1024"}, {"seq_length", "8192"}, {"num_hidden_layers", "4"}};
  auto with = [](std::vector<config::Setting> all, const std::vector<config::Setting>& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  struct Small { std::int64_t gpus, batch; std::vector<config::Setting> settings; bool prunes = false; };
  for (const auto& [gpus, batch, settings, prunes] : {
           Small{4, 1, {{"num_hidden_layers", "4"}}},
           Small{2, 2, {{"num_hidden_layers", "4"}}},
           Small{2, 1, {{"stack", "native"}, {"num_hidden_layers", "4"}}},
           Small{2, 4, {{"num_hidden_layers", "5"}}}, // 5 layers on 2 stages: uneven
           Small{2, 2, wide, true},
           Small{2, 2, with(wide, {{"overlap_grad_reduce", "true"}}), true},
           Small{2, 2, with(wide, {{"overlap_grad_reduce", "true"}, {"overlap_param_gather", "true"}}), true},
           Small{2, 2, with(wide, {{"tp_comm_overlap", "true"}, {"moe_shared_expert_overlap", "true"}}), true},
           Small{2, 4, with(wide, {{"overlap_moe_expert_parallel_comm", "true"}}), true}}) {
    std::string name;
    for (const config::Setting& x : settings) name += x.key + "=" + x.value + " ";
    CAPTURE(name);
    Space s("tiny", gpus, batch, settings);
    if (prunes) s.hardware.reserve.clear(); // a context larger than the peaks would hide what a budget rules out
    const std::vector<Priced> all = brute_force(s);
    REQUIRE(all.size() > 100);
    std::vector<Bytes> totals;
    for (const Priced& p : all) totals.push_back(p.total);
    std::sort(totals.begin(), totals.end());
    std::int64_t dominated = 0, over = 0;
    for (double share : {0.0, 0.1, 0.5, 1.0}) {
      CAPTURE(share);
      const Bytes budget = totals[static_cast<size_t>(share * static_cast<double>(totals.size() - 1))];
      plan::SearchOptions options;
      options.budget = budget;
      const plan::Search found = plan::search(s.profile.model, s.profile.run, s.hardware, options);
      std::vector<std::pair<Seconds, Bytes>> front;
      for (const plan::SearchPoint& p : found.front) front.emplace_back(p.estimate.step_seconds, p.estimate.peak_bytes);
      CHECK(front == front_of(all, budget));
      const plan::SearchCounts& c = found.counts;
      CHECK(c.candidates == static_cast<std::int64_t>(all.size()));
      CHECK(c.static_state + c.memory_bound + c.dominated + c.evaluated == c.candidates);
      dominated += c.dominated;
      over += c.memory_bound;
    }
    if (prunes) {
      CHECK(dominated > 0);
      CHECK(over > 0);
    }
    plan::SearchOptions nothing;
    nothing.budget = totals.front() - 1;
    CHECK(plan::search(s.profile.model, s.profile.run, s.hardware, nothing).front.empty());
  }
}

TEST_CASE("a layer's halves compose to the layer, under every setting of the 35B") {
  const Space s("qwen3.5-35b-a3b", 8, 64, {{"tensor_model_parallel_size", "2"}, {"sequence_parallel", "true"}, {"expert_model_parallel_size", "4"}});
  const config::Run& run = s.profile.run;
  const model::Provider& provider = model::upstream_provider();
  const cost::CostModel cost(s.hardware, "upstream", run.parallel, run.dtype);
  auto extent = [&](const model::OpList& list, const plan::Setting& setting) {
    const auto t = program::trace(list, model::spans_for(list, setting.modules, {}, run.stack), provider);
    return plan::extent_of(program::summarise(t), cost.time(t, provider));
  };
  plan::Workload workload(s.profile.model, run, provider);
  for (config::LayerKind mixer : {config::LayerKind::Gdn, config::LayerKind::Attention}) {
    const model::OpList whole = model::decoder_layer(s.profile.model, run, mixer, config::MlpKind::Moe);
    const std::vector<model::OpList> parts = plan::halves(whole);
    REQUIRE(parts.size() == 2);
    CHECK(parts[0].ops.size() + parts[1].ops.size() == whole.ops.size());
    for (const plan::Setting& setting : plan::legal_settings(workload, false)) {
      if (setting.granularity == config::Granularity::Full) continue;
      CAPTURE(setting.text());
      const plan::Extent a = extent(whole, setting), b = extent(parts[0], setting).then(extent(parts[1], setting));
      CHECK(a.retained == b.retained);
      CHECK(a.forward == b.forward);
      CHECK(a.backward == b.backward);
      CHECK(a.forward_time == doctest::Approx(b.forward_time).scale(0).epsilon(1e-9));
      CHECK(a.backward_time == doctest::Approx(b.backward_time).scale(0).epsilon(1e-9));
    }
  }
}

TEST_CASE("the result does not depend on who was faster, and flags name what was found") {
  const Space s("qwen3.5-35b-a3b", 8, 16);
  const plan::Search a = plan::search(s.profile.model, s.profile.run, s.hardware), b = plan::search(s.profile.model, s.profile.run, s.hardware);
  REQUIRE(!a.front.empty());
  CHECK(a.front.size() == b.front.size());
  CHECK(a.counts.evaluated == b.counts.evaluated);
  CHECK(a.counts.dominated == b.counts.dominated);
  for (size_t i = 0; i < a.front.size(); ++i) {
    CHECK(a.front[i].estimate.setting.text() == b.front[i].estimate.setting.text());
    CHECK(!model::any_rejected(model::validate(s.profile.model, a.front[i].run)));
    CHECK(a.front[i].estimate.fits);
    if (i > 0) {
      CHECK(a.front[i].estimate.peak_bytes < a.front[i - 1].estimate.peak_bytes);
      CHECK(a.front[i].estimate.step_seconds > a.front[i - 1].estimate.step_seconds);
    }
  }
  const std::vector<std::string> flags = plan::megatron_parallel_flags(s.profile.model, a.front.front().run);
  auto value = [&](const char* flag) {
    auto it = std::find(flags.begin(), flags.end(), flag);
    return it == flags.end() ? std::string("1") : *(it + 1);
  };
  CHECK(value("--pipeline-model-parallel-size") == std::to_string(a.front.front().run.parallel.pp));
  CHECK(value("--expert-model-parallel-size") == std::to_string(a.front.front().run.parallel.ep));
  CHECK(value("--global-batch-size") == "16");
  // The plan of the same layout knows nothing faster that fits.
  const plan::Plan p = plan::make_plan(s.profile.model, s.profile.run, s.hardware);
  for (const plan::Candidate& c : p.candidates)
    if (c.estimate.fits) CHECK(a.front.front().estimate.step_seconds <= c.estimate.step_seconds);
}

TEST_CASE("optimizer options multiply the layouts and can only help") {
  const Space s("tiny", 2, 4);
  plan::SearchOptions options;
  const plan::Search plain = plan::search(s.profile.model, s.profile.run, s.hardware, options);
  options.optimizer_options = true;
  const plan::Search more = plan::search(s.profile.model, s.profile.run, s.hardware, options);
  CHECK(more.counts.parallel_points == 4 * plain.counts.parallel_points);
  CHECK(more.front.back().estimate.peak_bytes < plain.front.back().estimate.peak_bytes);
  CHECK(more.front.front().estimate.step_seconds <= plain.front.front().estimate.step_seconds);
}

TEST_CASE("where the layers do not divide, the stages with the embedding and the loss are the lighter ones") {
  const Space s("qwen3.5-35b-a3b", 16, 64);
  bool found = false;
  for (const config::Run& r : plan::parallel_points(s.profile.model, s.profile.run)) {
    const config::Parallel& p = r.parallel;
    CHECK(p.layout.empty() == (40 % (p.pp * p.vp) == 0));
    if (p.pp != 16 || p.vp != 1) continue;
    found = true;
    CHECK(p.layout == std::vector<std::int64_t>{2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2});
    const std::vector<std::string> flags = plan::megatron_parallel_flags(s.profile.model, r);
    const auto at = std::find(flags.begin(), flags.end(), "--pipeline-model-parallel-layout");
    REQUIRE(at != flags.end());
    CHECK((at + 1)->starts_with("\"Et*2|t*2|"));
    CHECK((at + 1)->ends_with("|t*2mL\"")); // the 35B's MTP layer lies on the last stage
  }
  CHECK(found);
}
