#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "tests/plan/published.h"

using namespace gdn;

// The band around a step is as wide as measured steps were off: those of a profile with its rows, and of the same
// profile without them.
namespace {

const char* const kFiles[] = {"simumax-llama3-70b-b200", "simumax-llama3-405b-b200"};

plan::Estimate price(const test::PublishedRow& row, const config::Hardware& hardware) {
  return plan::Estimator(row.profile.model, row.profile.run, hardware).evaluate(plan::Setting::of(row.profile.run));
}

} // namespace

TEST_CASE("31 published steps lie in the band of measured efficiencies, and of defaults where there are none") {
  int rows = 0;
  for (const char* file : kFiles)
    for (const test::PublishedRow& row : test::published_rows(file)) {
      CAPTURE(row.id);
      const double measured = row.value("time.step_seconds");
      const plan::Estimate with = price(row, row.hardware);
      CHECK(with.step_low <= measured);
      CHECK(with.step_high >= measured);
      config::Hardware bare = row.hardware;
      bare.efficiencies.clear();
      const plan::Estimate without = price(row, bare);
      CHECK(without.step_low <= measured);
      CHECK(without.step_high >= measured);
      CHECK(without.step_high / without.step_low > with.step_high / with.step_low);
      ++rows;
    }
  CHECK(rows == 31);
}

TEST_CASE("our efficiencies say nothing about upstream's kernels; upstream's stand in for ours, by name") {
  const config::Hardware h200 = config::Profiles().hardware("h200");
  auto only = [&](const std::string& provider) {
    config::Hardware h = h200;
    std::erase_if(h.efficiencies, [&](const config::EfficiencyRow& r) { return r.provider != provider; });
    return h;
  };
  const model::Work gemm{.flops = 1e12, .traffic = 1, .family = model::Family::Gemm, .size = 1e12};
  const config::Hardware ours = only("own"), theirs = only("upstream");
  const cost::CostModel upstream(ours, "upstream", {}, DType::BF16), own(theirs, "own", {}, DType::BF16);
  CHECK(upstream.seconds(gemm, "forward") == doctest::Approx(1e12 / (989e12 * 0.60) + 3e-6).scale(0)); // the default of any GPU
  CHECK(own.seconds(gemm, "forward") == doctest::Approx(1e12 / (989e12 * 0.78) + 3e-6).scale(0));
  auto says = [](const cost::CostModel& cost, const std::string& what) {
    return std::any_of(cost.assumptions().begin(), cost.assumptions().end(), [&](const cost::Assumption& a) { return a.text.find(what) != std::string::npos; });
  };
  CHECK(says(upstream, "no measurement in profile 'h200'"));
  CHECK(says(own, "borrowed from provider 'upstream'"));
  CHECK(upstream.doubt(gemm, "forward") > own.doubt(gemm, "forward"));
}

TEST_CASE("stack native is priced with our kernels, unless others are named") {
  const config::ModelProfile p = config::Profiles().model(test::source_file("examples/qwen3.5-35b-proxy.yaml"), {});
  const config::Hardware h200 = config::Profiles().hardware("h200");
  plan::Estimator own(p.model, p.run, h200), upstream(p.model, p.run, h200, std::nullopt, &model::upstream_provider());
  CHECK(own.workload().provider().name() == "own");
  CHECK(upstream.workload().provider().name() == "upstream");
  CHECK(own.evaluate({}).step_seconds != upstream.evaluate({}).step_seconds);
  // A step of 132 ms was measured on an H200 (README).
  CHECK(std::fabs(own.evaluate({}).step_seconds / 0.132 - 1) < 0.05);
}

TEST_CASE("the names that a hardware file may give rows to are those of the model") {
  const std::vector<std::string>& families = config::efficiency_families();
  for (int f = 0; f < static_cast<int>(model::Family::None); ++f)
    CHECK(std::count(families.begin(), families.end(), model::name_of(static_cast<model::Family>(f))) == 1);
  CHECK(families.size() == static_cast<std::size_t>(model::Family::None));
  const std::vector<std::string>& ops = config::efficiency_ops();
  for (int k = 0; k < static_cast<int>(model::OpKind::Toy); ++k) {
    const auto kind = static_cast<model::OpKind>(k);
    if (kind == model::OpKind::GroupedLinear) continue; // expert_fc1, expert_fc2
    CHECK(std::count(ops.begin(), ops.end(), model::name_of(kind)) == 1);
  }
  CHECK(ops.size() == static_cast<std::size_t>(model::OpKind::Toy) + 1);
}
