#include <doctest/doctest.h>

#include <algorithm>

#include "config/profiles.h"
#include "plan/explain.h"
#include "plan/explore.h"
#include "plan/timeline.h"

using namespace gdn;

namespace {

struct ExplainCase {
  config::ModelProfile profile;
  config::Hardware hardware = config::Profiles().hardware("h200");

  explicit ExplainCase(const char* model, std::vector<config::Setting> settings = {}) : profile(config::Profiles().model(model, settings)) {}
  plan::Estimate price(const plan::Setting& s) const { return plan::Estimator(profile.model, profile.run, hardware).evaluate(s); }
};

plan::Setting of_modules(std::vector<std::string> modules) {
  plan::Setting s;
  s.granularity = modules.empty() ? config::Granularity::None : config::Granularity::Selective;
  s.modules = std::move(modules);
  return s;
}

const plan::Candidate& find(const plan::Plan& p, const char* setting) {
  auto it = std::find_if(p.candidates.begin(), p.candidates.end(), [&](const plan::Candidate& c) { return c.estimate.setting.text() == setting; });
  REQUIRE(it != p.candidates.end());
  return *it;
}

} // namespace

TEST_CASE("more modules may need more: the planner prefers the smaller set") {
  const ExplainCase c("tiny");
  const plan::Estimate fewer = c.price(of_modules({"moe"})), more = c.price(of_modules({"moe", "moe_act"}));
  REQUIRE(more.peak_bytes > fewer.peak_bytes);
  REQUIRE(more.step_seconds >= fewer.step_seconds);
  plan::PlanOptions options;
  options.budget = fewer.total_bytes; // room for the smaller set to the byte
  const plan::Plan p = plan::make_plan(c.profile.model, c.profile.run, c.hardware, options);
  CHECK(find(p, "moe").estimate.fits);
  CHECK(!find(p, "moe + moe_act").estimate.fits);
  CHECK(find(p, "moe + moe_act").dominated);
  REQUIRE(p.proposal);
  CHECK(p.proposal->setting.text().find("moe + moe_act") == std::string::npos);
  CHECK(std::any_of(p.notices.begin(), p.notices.end(), [](const plan::Notice& n) { return n.key == "higher_peak"; }));
}

TEST_CASE("explain says what each module frees, alone and on top of the others, as pricing them says") {
  const ExplainCase c("qwen3.5-35b-a3b");
  const plan::Setting setting = of_modules({"core_attn", "moe_act", "gdn_norm_out"});
  const plan::Explanation x = plan::explain(c.profile.model, c.profile.run, c.hardware, setting);
  const plan::Estimate none = c.price({}), with = c.price(setting);
  CHECK(x.without.peak_bytes == none.peak_bytes);
  CHECK(x.with.peak_bytes == with.peak_bytes);
  REQUIRE(x.modules.size() == 3);
  for (const plan::ModuleEffect& m : x.modules) {
    CAPTURE(m.module);
    std::vector<std::string> others = setting.modules;
    std::erase(others, m.module);
    CHECK(m.alone == none.peak_bytes - c.price(of_modules({m.module})).peak_bytes);
    CHECK(m.marginal == c.price(of_modules(others)).peak_bytes - with.peak_bytes);
    CHECK(m.replay > 0);
  }
  // Fused attention keeps next to nothing: said once, for the module it is about.
  CHECK(x.modules[0].reasons.size() >= 1);
  CHECK(x.modules[0].reasons[0].find("log-sum-exp") != std::string::npos);
  CHECK(x.findings[1].find(with.worst_rank().peak_event) != std::string::npos);
}

TEST_CASE("levers lower the peak by what they say, most first; a nested module is named") {
  const ExplainCase c("qwen3.5-35b-a3b");
  const plan::Explanation x = plan::explain(c.profile.model, c.profile.run, c.hardware, of_modules({"moe", "moe_act"}));
  REQUIRE(x.levers.size() >= 4);
  for (size_t i = 0; i < x.levers.size(); ++i) {
    CHECK(x.levers[i].freed > 0);
    CHECK(x.levers[i].freed == x.with.peak_bytes - x.levers[i].estimate.peak_bytes);
    if (i) CHECK(x.levers[i].freed <= x.levers[i - 1].freed);
  }
  CHECK(std::any_of(x.levers.begin(), x.levers.end(), [](const plan::Lever& l) { return l.recompute; }));
  CHECK(std::any_of(x.levers.begin(), x.levers.end(), [](const plan::Lever& l) { return !l.recompute; }));
  const std::vector<std::string>& reasons = x.modules[1].reasons;
  CHECK(std::any_of(reasons.begin(), reasons.end(), [](const std::string& r) { return r.find("lies inside moe") != std::string::npos; }));
}

TEST_CASE("explore: the cheap ops between in_proj and the rule beat gdn_qkv, which replays a GEMM") {
  const ExplainCase c("qwen3.5-35b-a3b", {{"recompute_modules", "[]"}});
  const plan::Exploration x = plan::explore(c.profile.model, c.profile.run, c.hardware);
  auto span = [&](const char* text) -> const plan::ExploredSpan& {
    auto it = std::find_if(x.spans.begin(), x.spans.end(), [&](const plan::ExploredSpan& s) { return s.text() == text; });
    REQUIRE(it != x.spans.end());
    return *it;
  };
  auto today = [&](const char* name) -> const plan::ExploredSpan& {
    auto it = std::find_if(x.modules.begin(), x.modules.end(), [&](const plan::ExploredSpan& s) { return s.module == name; });
    REQUIRE(it != x.modules.end());
    return *it;
  };
  const plan::ExploredSpan &cheap = span("conv1d..gates:discard"), &qkv = today("gdn_qkv");
  CHECK(cheap.freed > qkv.freed);
  CHECK(cheap.replay < qkv.replay / 2);
  CHECK(cheap.value() > 2.5 * qkv.value());
  // A module is one of the spans: the same ops in the same kind measure the same.
  const plan::ExploredSpan& same = span("in_proj.layer_norm..gates");
  CHECK(same.freed == qkv.freed);
  CHECK(same.replay == doctest::Approx(qkv.replay).scale(0));
  const plan::ExploredSpan& act = span("expert_act:discard");
  CHECK(act.freed == today("moe_act").freed);
  // What it says is what pricing the span says; the front is a front.
  plan::Setting s = of_modules({});
  s.granularity = config::Granularity::Selective;
  s.user_spans.push_back({"cheap", "conv1d", "gates", true});
  CHECK(cheap.freed == c.price({}).peak_bytes - c.price(s).peak_bytes);
  for (size_t i = 1; i < x.front.size(); ++i) {
    CHECK(x.front[i].freed > x.front[i - 1].freed);
    CHECK(x.front[i].replay >= x.front[i - 1].replay);
  }
  for (const plan::ExploredSpan& f : x.front)
    CHECK(std::none_of(x.spans.begin(), x.spans.end(), [&](const plan::ExploredSpan& o) { return o.freed > f.freed && o.replay < f.replay; }));
}

TEST_CASE("stack native offers by name the best find of its exploration") {
  const ExplainCase c("qwen3.5-35b-a3b", {{"stack", "native"}, {"recompute_modules", "[]"}});
  const plan::Exploration x = plan::explore(c.profile.model, c.profile.run, c.hardware);
  REQUIRE(!x.spans.empty());
  REQUIRE(x.modules.size() > 1);
  const plan::ExploredSpan &found = x.spans.front(), &best = x.modules[0], &next = x.modules[1];
  CHECK(found.text() == "rule..out_proj");
  CHECK(best.module == "gdn_rule");
  CHECK(best.freed == found.freed);
  CHECK(best.replay == doctest::Approx(found.replay).scale(0));
  CHECK(next.module == "gdn_proj"); // frees more, at a higher price
  CHECK(next.freed > best.freed);
}

TEST_CASE("the timeline peaks where the estimate says, at what it says, and never above") {
  for (const char* pipeline : {"1", "4"}) {
    const ExplainCase c("qwen3.5-35b-a3b", {{"pipeline_model_parallel_size", pipeline}, {"gpus", "16"}, {"expert_model_parallel_size", "4"}});
    plan::Estimator estimator(c.profile.model, c.profile.run, c.hardware);
    const plan::Estimate e = estimator.evaluate(of_modules({"gdn_qkv"}));
    const plan::Timeline t = plan::timeline(estimator, e, c.profile.model, c.profile.run, 200);
    REQUIRE(t.levels.size() == 200);
    Bytes most = 0;
    for (const CategoryBytes& level : t.levels) {
      most = std::max(most, level.total());
      CHECK(level[Category::Parameters] == e.worst_rank().peak.by[Category::Parameters]);
      CHECK(level[Category::Activations] >= 0);
    }
    CHECK(most == e.peak_bytes);
    CHECK(t.levels[static_cast<size_t>(t.peak)].total() == e.peak_bytes);
    CHECK(t.passes.front().pass == program::Pass::Forward);
    CHECK(std::any_of(t.passes.begin(), t.passes.end(), [](const plan::PassStretch& p) { return p.pass == program::Pass::Replay; }));
    CHECK(t.passes.back().to == doctest::Approx(t.end).scale(0));
  }
}

TEST_CASE("a pipeline stage without layers holds no state and delays nobody by its own passes") {
  auto at = [](const char* layout) {
    return config::Profiles().model("qwen3.5-35b-a3b", {{"gpus", "24"}, {"global_batch_size", "24"}, {"pipeline_model_parallel_size", "3"},
                                                        {"pipeline_model_parallel_layout", layout}});
  };
  const config::Hardware h = config::Profiles().hardware("h200");
  const config::ModelProfile p = at("[20,0,20]"), less = at("[20,1,19]");
  plan::Estimator estimator(p.model, p.run, h);
  const plan::Estimate e = estimator.evaluate({});
  const plan::RankEstimate& empty = e.ranks[1];
  CHECK(empty.layers == 0);
  CHECK(empty.state.total() == 0);
  Bytes library = 0; // what is left of its memory
  for (const model::LibraryBuffer& b : empty.library) library += b.bytes;
  CHECK(empty.peak.bytes == library);
  CHECK(empty.forward == 0);
  CHECK(e.worst != 1);
  // The first stage has the same layers in both; its peak does not know what is behind it.
  CHECK(e.ranks[0].peak.bytes == plan::Estimator(less.model, less.run, h).evaluate({}).ranks[0].peak.bytes);
  CHECK(!plan::explain(p.model, p.run, h, {}).levers.empty());
}
