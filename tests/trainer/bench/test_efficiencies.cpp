#include <doctest/doctest.h>

#include <cmath>

#include "config/hardware_io.h"
#include "config/profiles.h"
#include "config/yaml.h"
#include "core/error.h"
#include "cost/cost.h"
#include "trainer/bench/efficiencies.h"

using namespace gdn;
using namespace gdn::trainer::bench;
using model::Family;

namespace {

// Round figures, so that times can be computed by hand.
config::Hardware machine() {
  config::Hardware h;
  h.name = "machine";
  h.device_name = "Machine";
  h.sm = "90";
  h.memory = Bytes{1} << 30;
  h.bf16 = 1e15;
  h.bandwidth = 5e12;
  h.achieved_bandwidth = 4e12;
  h.launch_latency = 4e-6;
  return h;
}

model::Work work(Family family, double flops, Bytes traffic, double size, int kernels = 1) {
  model::Work w;
  w.flops = flops;
  w.traffic = traffic;
  w.family = family;
  w.size = size;
  w.kernels = kernels;
  return w;
}

const config::EfficiencyRow* find(const std::vector<config::EfficiencyRow>& rows, const std::string& family, const std::string& pass, double size) {
  for (const config::EfficiencyRow& r : rows)
    if (r.family == family && r.pass == pass && r.size && std::abs(*r.size / size - 1) < 1e-5) return &r;
  return nullptr;
}

constexpr const char* kFile = R"(# A machine.
name: machine
device_name: Machine
sm: 90
memory: {value: 1 GiB, source: "test"}
bf16: {value: 1 PFLOP/s, source: "test"}
bandwidth: {value: 5 TB/s, source: "test"}
achieved_bandwidth: {value: 4 TB/s, source: "test"}
launch_latency: {value: 4 us, source: "test"}
efficiencies:
  # Others' kernels.
  - {provider: upstream, family: gemm, pass: forward, value: 0.7, source: "test"}
  - {provider: own, family: gemm, pass: forward, size: 1e9, value: 0.2, source: "old"}
  - {provider: own, family: gemm, pass: forward, size: 1e10, value: 0.3, source: "old"}
  - {provider: own, family: norm, pass: any, value: 0.6, source: "old"}

# Links.
collectives:
  - {kind: all_reduce, link: scale_up, share: 0.8, latency: 22 us, source: "test"}
)";

} // namespace

TEST_CASE("known efficiencies come back from the times that the cost model makes of them") {
  config::Hardware truth = machine();
  for (const auto& [family, pass, size, value] : {std::tuple{"gemm", "forward", 1e12, 0.7}, {"gemm", "forward", 1e10, 0.35}, {"gemm", "wgrad", 1e12, 0.61},
                                                  {"grouped_gemm", "dgrad", 512.0, 0.44}, {"rule", "backward", 5e11, 0.09}, {"norm", "forward", 2e9, 0.8},
                                                  {"norm", "forward", 1e8, 0.5}, {"elementwise", "backward", 3e8, 0.72}})
    truth.efficiencies.push_back({"own", family, pass, size, value, "made up"});
  const cost::CostModel cost(truth, "own", {}, DType::BF16);
  std::vector<Sample> samples;
  for (const auto& [w, pass] : std::vector<std::pair<model::Work, std::string>>{
           {work(Family::Gemm, 1e12, 1 << 28, 1e12), "forward"}, {work(Family::Gemm, 1e10, 1 << 20, 1e10), "forward"}, {work(Family::Gemm, 1e12, 1 << 28, 1e12, 2), "wgrad"},
           {work(Family::GroupedGemm, 4e12, 1 << 28, 512), "dgrad"}, {work(Family::Rule, 5e11, 1 << 28, 5e11, 4), "backward"},
           {work(Family::Norm, 0, 2'000'000'000, 2e9), "forward"}, {work(Family::Norm, 0, 100'000'000, 1e8), "forward"},
           {work(Family::Elementwise, 0, 300'000'000, 3e8, 3), "backward"}, {work(Family::None, 0, 0, 0), "forward"}})
    samples.push_back({w, pass, cost.seconds(w, pass), 3});
  const std::vector<config::EfficiencyRow> rows = fit_efficiencies(samples, machine(), "own", DType::BF16, "test");
  CHECK(rows.size() == truth.efficiencies.size());
  for (const config::EfficiencyRow& known : truth.efficiencies) {
    const config::EfficiencyRow* r = find(rows, known.family, known.pass, *known.size);
    REQUIRE_MESSAGE(r, known.family << " " << known.pass);
    CHECK(r->value == doctest::Approx(known.value).scale(0).epsilon(1e-5));
    CHECK(r->provider == "own");
  }
}

TEST_CASE("ops of one size share a row that keeps their total time") {
  // 1e9 bytes at 5 TB/s: 200 us at share 1. 250 us once and 400 us three times: 800 us of 1450.
  std::vector<Sample> samples{{work(Family::Norm, 0, 1'000'000'000, 1e9, 0), "forward", 250e-6, 1}, {work(Family::Norm, 0, 1'000'000'000, 1e9, 0), "forward", 400e-6, 3}};
  auto rows = fit_efficiencies(samples, machine(), "own", DType::BF16, "test");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].value == doctest::Approx(800.0 / 1450).scale(0).epsilon(1e-5));
  // No more rows than asked for; the nearest sizes join.
  for (int i = 0; i < 40; ++i) samples.push_back({work(Family::Norm, 0, 1'000'000 << i / 4, 1e6 * (1 << i / 4) * (1 + 0.2 * (i % 4)), 0), "forward", 1e-3, 1});
  CHECK(fit_efficiencies(samples, machine(), "own", DType::BF16, "test", 5).size() == 5);
}

TEST_CASE("ops of one family and size get rows of their own, and the family one that keeps their total time") {
  const config::Hardware h = machine();
  model::Work slow = work(Family::Norm, 0, 1'000'000'000, 1e9), fast = slow, other = slow;
  slow.op = "gated_norm";
  fast.op = "rms_norm";
  const Seconds ideal = 1e9 / 5e12, launch = 4e-6;
  const std::vector<Sample> samples{{slow, "forward", ideal / 0.25 + launch, 1}, {fast, "forward", ideal / 0.5 + launch, 3}};
  config::Hardware fitted = h;
  replace_efficiencies(fitted, fit_efficiencies(samples, h, "own", DType::BF16, "test"));
  CHECK(fitted.efficiencies.size() == 3);
  const cost::CostModel cost(fitted, "own", {}, DType::BF16);
  CHECK(cost.seconds(slow, "forward") == doctest::Approx(ideal / 0.25 + launch).epsilon(1e-5).scale(0));
  CHECK(cost.seconds(fast, "forward") == doctest::Approx(ideal / 0.5 + launch).epsilon(1e-5).scale(0));
  CHECK(cost.seconds(other, "forward") == doctest::Approx(ideal / 0.4 + launch).epsilon(1e-5).scale(0)); // four runs in ten units of time
  other.op = "l2norm"; // not measured: the family's
  CHECK(cost.seconds(other, "forward") == cost.seconds(work(Family::Norm, 0, 1'000'000'000, 1e9), "forward"));

  // Through a file and back: what is measured again takes the place of its own rows and of the family's, and of no other op's.
  const std::string text = with_efficiencies(kFile, "h.yaml", fitted.efficiencies);
  const config::Hardware last = config::read_hardware(config::parse_yaml(with_efficiencies(text, "h.yaml", fit_efficiencies({{fast, "forward", ideal + launch, 1}}, h, "own", DType::BF16, "test")), "h.yaml"));
  const cost::CostModel later(last, "own", {}, DType::BF16);
  CHECK(later.seconds(fast, "forward") == doctest::Approx(ideal + launch).epsilon(1e-5).scale(0));
  CHECK(later.seconds(other, "forward") == doctest::Approx(ideal + launch).epsilon(1e-5).scale(0));
  CHECK(later.seconds(slow, "forward") == doctest::Approx(ideal / 0.25 + launch).epsilon(1e-5).scale(0));
  // An op that only other ops' rows stand for is doubted more, and named.
  CHECK(later.doubt(other, "forward") > later.doubt(fast, "forward"));
  CHECK(std::any_of(later.assumptions().begin(), later.assumptions().end(), [](const cost::Assumption& a) { return a.text.find("l2norm forward: efficiency of other ops of family norm") == 0; }));
}

TEST_CASE("what bytes explain says nothing about the matrix units") {
  // 4e9 bytes take 1 ms at 4 TB/s, its 1e11 FLOP 0.1 ms at the peak.
  const Sample hidden{work(Family::Gemm, 1e11, 4'000'000'000, 1e11, 0), "forward", 1e-3, 1};
  const Sample plain{work(Family::Gemm, 1e12, 1'000'000'000, 1e12, 0), "forward", 2e-3, 1};
  auto rows = fit_efficiencies({hidden, plain}, machine(), "own", DType::BF16, "test");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].value == doctest::Approx(0.5).scale(0));
  rows = fit_efficiencies({hidden}, machine(), "own", DType::BF16, "test"); // nothing better: a lower bound
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].value == doctest::Approx(0.1).scale(0));
}

TEST_CASE("a hardware file keeps its other rows and its comments") {
  const std::string text = kFile;
  const std::vector<config::EfficiencyRow> rows{{"own", "gemm", "forward", 2e10, 0.55, "new \"quoted\""}, {"own", "rule", "backward", 1e11, 0.08, "new"}};
  const std::string out = with_efficiencies(text, "machine.yaml", rows);
  for (const char* kept : {"# A machine.", "# Others' kernels.", "# Links.", "all_reduce", "family: norm, pass: any, value: 0.6"}) CHECK(out.find(kept) != std::string::npos);
  const config::Hardware h = config::read_hardware(config::parse_yaml(out, "machine.yaml"));
  CHECK(h.efficiencies.size() == 4);
  CHECK(find(h.efficiencies, "gemm", "forward", 2e10)->value == 0.55);
  CHECK(find(h.efficiencies, "gemm", "forward", 1e9) == nullptr);
  CHECK(find(h.efficiencies, "rule", "backward", 1e11)->value == 0.08);
  CHECK(h.collectives.size() == 1);
  CHECK(with_efficiencies(out, "machine.yaml", rows) == out); // once more changes nothing

  // Rows in another form: the file is written anew and says the same.
  std::string block = text;
  const std::string row = "  - {provider: own, family: gemm, pass: forward, size: 1e9, value: 0.2, source: \"old\"}\n";
  block.replace(block.find(row), row.size(), "  - provider: own\n    family: gemm\n    pass: forward\n    size: 1e9\n    value: 0.2\n    source: old\n");
  const config::Hardware other = config::read_hardware(config::parse_yaml(with_efficiencies(block, "machine.yaml", rows), "machine.yaml"));
  CHECK(other.efficiencies.size() == 4);
  CHECK(find(other.efficiencies, "gemm", "forward", 2e10)->value == 0.55);
}

TEST_CASE("the built-in H200 profile takes rows and is still read") {
  config::Hardware h = config::Profiles().hardware("h200");
  const size_t others = static_cast<size_t>(std::count_if(h.efficiencies.begin(), h.efficiencies.end(), [](const auto& r) { return r.provider != "own"; }));
  replace_efficiencies(h, {{"own", "gemm", "forward", 1e12, 0.7, "test"}});
  const config::Hardware back = config::read_hardware(config::parse_yaml(config::to_yaml(config::to_node(h)), "h200.yaml"));
  CHECK(back.efficiencies.size() == h.efficiencies.size());
  CHECK(static_cast<size_t>(std::count_if(back.efficiencies.begin(), back.efficiencies.end(), [](const auto& r) { return r.provider != "own"; })) == others);
  REQUIRE(find(back.efficiencies, "gemm", "forward", 1e12));
}

TEST_CASE("share and latency of a collective") {
  // 20 us and 300 GB/s of a 400 GB/s link.
  auto seconds = [](double wire) { return 20e-6 + wire / 300e9; };
  std::vector<CollectiveSample> samples;
  for (double wire : {1e5, 1e7, 1e9}) samples.push_back({wire, seconds(wire)});
  const config::CollectiveRow row = fit_collective("all_reduce", samples, 400e9, "test");
  CHECK(row.share == doctest::Approx(0.75).scale(0).epsilon(1e-3));
  CHECK(row.latency == doctest::Approx(20e-6).scale(0).epsilon(1e-2));
  CHECK_THROWS_AS(fit_collective("all_reduce", {samples[0]}, 400e9, "test"), Error);
}
