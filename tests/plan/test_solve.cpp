#include <doctest/doctest.h>

#include <algorithm>

#include "config/profiles.h"
#include "model/stack_lists.h"
#include "model/validate.h"
#include "plan/solve.h"

using namespace gdn;

namespace {

struct SolveCase {
  config::ModelProfile profile;
  config::Hardware hardware = config::Profiles().hardware("h100");

  explicit SolveCase(const char* model, std::vector<config::Setting> settings = {}) : profile(config::Profiles().model(model, settings)) {}

  // Fits under some setting that `freedom` allows; independent of the solver.
  bool fits(config::Run run, plan::Freedom freedom, Bytes budget) const {
    const plan::Setting own = plan::Setting::of(run);
    if (model::any_rejected(model::validate(profile.model, run))) return false;
    plan::Estimator e(profile.model, run, hardware, budget);
    if (freedom == plan::Freedom::Setting) return e.evaluate(own).fits;
    const std::vector<plan::Setting> all = plan::legal_settings(e.workload(), false);
    return std::any_of(all.begin(), all.end(), [&](const plan::Setting& s) { return e.evaluate(s).fits; });
  }
  plan::Solved solve(plan::Unknown u, plan::Freedom f, Bytes budget, std::int64_t step = 0) const {
    plan::SolveOptions o;
    o.budget = budget;
    o.step = step;
    return plan::solve(profile.model, profile.run, hardware, u, f, o);
  }
};

constexpr plan::Freedom kBoth[] = {plan::Freedom::Setting, plan::Freedom::Plan};

} // namespace

TEST_CASE("the longest sequence is the one that trying every length finds") {
  const SolveCase c("tiny");
  const Bytes budget = plan::Estimator(c.profile.model, c.profile.run, c.hardware).evaluate({}).total_bytes + 8 * kMiB;
  for (plan::Freedom freedom : kBoth) {
    const plan::Solved s = c.solve(plan::Unknown::Seq, freedom, budget, 256);
    std::int64_t longest = 0;
    for (std::int64_t seq = 256; seq <= 16384; seq += 256) {
      config::Run r = c.profile.run;
      r.seq = seq;
      if (c.fits(r, freedom, budget)) longest = seq;
    }
    REQUIRE(s.solution);
    CHECK(s.solution->value == longest);
    CHECK(longest < 16384);
    CHECK(s.solution->run.seq == longest);
    CHECK(s.solution->estimate.fits);
  }
  CHECK(!c.solve(plan::Unknown::Seq, plan::Freedom::Plan, kMiB, 64).solution);
}

TEST_CASE("no tensor of a layer shrinks with a longer sequence: what the sequence bound rests on") {
  for (const char* model : {"tiny", "qwen3.5-35b-a3b", "qwen3.5-27b"}) {
    const SolveCase c(model);
    config::Run run = c.profile.run;
    for (std::int64_t i : {std::int64_t{0}, c.profile.model.layers() - 1}) {
      std::vector<model::Storage> last;
      for (std::int64_t seq = 1024; seq <= 65536; seq += 4096) {
        run.seq = seq;
        const model::OpList list = model::decoder_layer(c.profile.model, run, c.profile.model.mixers[static_cast<size_t>(i)],
                                                        c.profile.model.mlps[static_cast<size_t>(i)]);
        for (size_t s = 0; s < last.size(); ++s) CHECK(list.storages[s].bytes >= last[s].bytes);
        CHECK((last.empty() || last.size() == list.storages.size()));
        last = list.storages;
      }
    }
  }
}

TEST_CASE("the largest micro-batch and the fewest GPUs are those that trying every one finds") {
  const SolveCase c("qwen3.5-35b-a3b");
  const Bytes budget = c.hardware.memory;
  for (plan::Freedom freedom : kBoth) {
    std::int64_t largest = 0, fewest = 0;
    for (std::int64_t n = 1; n <= 64; ++n) {
      config::Run r = c.profile.run;
      r.micro_batch = n;
      if (r.global_batch % (n * r.parallel.dp()) == 0 && c.fits(r, freedom, 2 * budget)) largest = n;
    }
    const plan::Solved mbs = c.solve(plan::Unknown::MicroBatch, freedom, 2 * budget);
    REQUIRE(mbs.solution);
    CHECK(mbs.solution->value == largest);
    for (std::int64_t n = 8; n <= 64 && !fewest; n += 8) {
      config::Run r = c.profile.run;
      r.parallel.gpus = n;
      if (r.global_batch % (r.micro_batch * r.parallel.dp()) == 0 && c.fits(r, freedom, budget)) fewest = n;
    }
    const plan::Solved gpus = c.solve(plan::Unknown::Gpus, freedom, budget);
    REQUIRE(gpus.solution.has_value() == (fewest > 0));
    if (fewest) CHECK(gpus.solution->value == fewest);
  }
}

TEST_CASE("the least budget fits, and one byte less does not") {
  const SolveCase c("tiny", {{"gpus", "2"}});
  for (plan::Freedom freedom : {plan::Freedom::Setting, plan::Freedom::Plan, plan::Freedom::Search}) {
    const plan::Solved s = c.solve(plan::Unknown::Budget, freedom, kGiB);
    REQUIRE(s.solution);
    plan::SearchOptions o;
    auto fits = [&](Bytes budget) {
      if (freedom != plan::Freedom::Search) return c.fits(c.profile.run, freedom, budget);
      o.budget = budget;
      return !plan::search(c.profile.model, c.profile.run, c.hardware, o).front.empty();
    };
    CHECK(fits(s.solution->value));
    CHECK(!fits(s.solution->value - 1));
  }
}

TEST_CASE("search solves for GPUs and the micro-batch over every layout") {
  const SolveCase c("tiny", {{"gpus", "2"}});
  const plan::Solved gpus = c.solve(plan::Unknown::Gpus, plan::Freedom::Search, c.hardware.memory);
  REQUIRE(gpus.solution);
  CHECK(gpus.solution->value == 1);
  const plan::Solved mbs = c.solve(plan::Unknown::MicroBatch, plan::Freedom::Search, c.hardware.memory);
  REQUIRE(mbs.solution);
  CHECK(mbs.solution->value == c.profile.run.global_batch); // one data-parallel rank takes the whole batch
}

TEST_CASE("search solves for the sequence between two powers of two") {
  const SolveCase c("tiny", {{"gpus", "2"}});
  auto fits = [&](std::int64_t seq, Bytes budget) {
    config::Run r = c.profile.run;
    r.seq = seq;
    plan::SearchOptions o;
    o.budget = budget;
    return !plan::search(c.profile.model, r, c.hardware, o).front.empty();
  };
  const Bytes budget = c.solve(plan::Unknown::Budget, plan::Freedom::Search, kGiB).solution->value + 64 * kMiB;
  const plan::Solved s = c.solve(plan::Unknown::Seq, plan::Freedom::Search, budget);
  REQUIRE(s.solution);
  const std::int64_t longest = s.solution->value;
  std::int64_t power = 1024;
  while (fits(2 * power, budget)) power *= 2;
  CHECK(longest >= power);
  CHECK(longest < 2 * power);
  CHECK(fits(longest, budget));
  CHECK(!fits(longest + std::max<std::int64_t>(1024, power / 16), budget)); // the step that it claims
}

TEST_CASE("a search for the sequence that ends at its longest length says so, and nothing of a longer one") {
  const SolveCase c("tiny", {{"gpus", "1"}, {"global_batch_size", "1"}, {"micro_batch_size", "1"}});
  const plan::Solved s = c.solve(plan::Unknown::Seq, plan::Freedom::Search, Bytes{1} << 50);
  REQUIRE(s.solution);
  CHECK(s.solution->value == 1 << 24);
  CHECK(s.guard.find("16,777,216, the longest that a search looks at") != std::string::npos);
  CHECK(s.guard.find("33,554,432") == std::string::npos);
}
