#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "config/profiles.h"
#include "model/megatron/layer.h"
#include "model/provider.h"
#include "plan/layer_view.h"

using namespace gdn;

namespace {

// One GDN module of Qwen3.5-35B-A3B, build local, 8,192 tokens, measured on an H200: milliseconds of
// the forward, and of one forward followed by one backward.
struct Row {
  const char* revision;
  std::vector<std::string> modules;
  double forward, both;
};
const std::array<Row, 6> kRows{{{"main", {}, 5.528, 10.95},
                                {"main", {"gdn_norm_out"}, 5.476, 11.234},
                                {"main+gdn_qkv", {"gdn_qkv"}, 5.271, 11.749},
                                {"main+gdn_qkv", {"gdn_qkv", "gdn_norm_out"}, 5.447, 14.192},
                                {"main+gdn_qkv", {}, 5.328, 10.84},
                                {"main+gdn_qkv", {"gdn_norm_out"}, 5.314, 12.136}}};

struct Fixture {
  config::ModelProfile profile = config::Profiles().model("qwen3.5-35b-a3b");
  config::Hardware hardware = config::Profiles().hardware("h200");

  Fixture() {
    config::Run& run = profile.run;
    run.parallel = {};
    run.seq = 8192;
    run.micro_batch = run.global_batch = 1;
    run.build = config::Build::Local;
  }

  // With one efficiency for each pass of the rule in place of every measured one.
  plan::LayerView view(const Row& row, double forward_efficiency, double backward_efficiency) {
    std::erase_if(hardware.efficiencies, [](const config::EfficiencyRow& r) { return r.family == "rule"; });
    hardware.efficiencies.push_back({"upstream", "rule", "forward", {}, forward_efficiency, "fitted"});
    hardware.efficiencies.push_back({"upstream", "rule", "backward", {}, backward_efficiency, "fitted"});
    profile.run.revision = Revision::parse(row.revision);
    plan::Setting s;
    s.granularity = config::Granularity::Selective;
    s.modules = row.modules;
    return plan::view_layer(profile.model, profile.run, hardware, "gdn", s);
  }
};

double ms(Seconds s) { return s * 1e3; }

} // namespace

TEST_CASE("two efficiencies fitted to the 35B rows give every measured time back within 15 %") {
  Fixture f;
  // Everything but the rule costs the same whatever its efficiency: take the rule out at one where
  // arithmetic surely limits it, then solve for its times. Forward: the mean of what is left. Forward
  // + backward: the value that balances the largest over- and underestimate.
  constexpr double kLow = 0.01;
  std::vector<double> rest_forward, rest_both;
  const config::Run& run = f.profile.run;
  double rule_forward = 0, rule_backward = 0;
  const model::OpList list = model::megatron::module_list(f.profile.model, run, "gdn");
  const model::Op& rule = list.ops[static_cast<size_t>(list.find_op("rule"))];
  const double at_peak_forward = ms(model::upstream_provider().work(list, rule, -1).flops / f.hardware.bf16);
  const double at_peak_backward = ms(model::upstream_provider().work(list, rule, 0).flops / f.hardware.bf16);
  for (const Row& row : kRows) {
    plan::LayerView v = f.view(row, kLow, kLow);
    rest_forward.push_back(ms(v.time.forward) - at_peak_forward / kLow);
    rest_both.push_back(ms(v.time.forward + v.time.backward + v.time.replay) - (at_peak_forward + at_peak_backward) / kLow);
  }
  for (size_t i = 0; i < kRows.size(); ++i) rule_forward += (kRows[i].forward - rest_forward[i]) / 6;
  double low = 0, high = 20; // bisection on the balance of relative errors
  for (int step = 0; step < 60; ++step) {
    rule_backward = (low + high) / 2;
    double over = -1, under = 1;
    for (size_t i = 0; i < kRows.size(); ++i) {
      const double error = (rest_both[i] + rule_forward + rule_backward) / kRows[i].both - 1;
      over = std::max(over, error);
      under = std::min(under, error);
    }
    (over + under > 0 ? high : low) = rule_backward;
  }
  const double forward_efficiency = at_peak_forward / rule_forward;
  const double backward_efficiency = at_peak_backward / rule_backward;
  CHECK(forward_efficiency > 0);
  CHECK(backward_efficiency > 0);
  for (const Row& row : kRows) {
    CAPTURE(row.revision);
    CAPTURE(row.modules.size());
    plan::LayerView v = f.view(row, forward_efficiency, backward_efficiency);
    CHECK(std::fabs(ms(v.time.forward) / row.forward - 1) < 0.15);
    CHECK(std::fabs(ms(v.time.forward + v.time.backward + v.time.replay) / row.both - 1) < 0.15);
  }
}

TEST_CASE("replaying gdn_qkv costs at least its in_proj GEMM and at most 1.6 times it") {
  Fixture f;
  f.hardware = config::Profiles().hardware("h200"); // as shipped
  f.profile.run.revision = Revision::parse("main+gdn_qkv");
  plan::Setting s;
  s.granularity = config::Granularity::Selective;
  s.modules = {"gdn_qkv"};
  plan::LayerView v = plan::view_layer(f.profile.model, f.profile.run, f.hardware, "gdn", s);
  // 2 x tokens x h x D at the measured 0.78 of the dense peak.
  const double gemm = 2.0 * 8192 * 2048 * 12352 / (0.78 * 989e12);
  CHECK(v.time.replay >= gemm);
  CHECK(v.time.replay <= 1.6 * gemm);
}
