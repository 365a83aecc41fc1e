#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "model/stages.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/bench/body.h"
#include "trainer/bench/op_times.h"
#include "trainer/bench/rule.h"

using namespace gdn;
using namespace gdn::trainer;

TEST_CASE("op times: every op of a step once, with the provider's work and the number of its runs") {
  CpuDevice device;
  const config::Model model = fixture::hybrid();
  const config::Run run = fixture::run();
  Session session(model, run, device);
  session.parameters().initialise(1);
  session.use({});
  bench::OpTimes times(session);
  const auto batches = fixture::batches(model, run);
  for (int step = 0; step < 3; ++step) session.run(batches, static_cast<std::uint64_t>(step), 1, times.observer());
  int runs = 0;
  double seconds = 0;
  for (const bench::OpTime& op : times.results()) {
    runs += op.runs;
    seconds += op.seconds * op.runs;
    CHECK(op.seconds > 0);
    CHECK_FALSE(op.communicates);
  }
  CHECK(runs == static_cast<int>(session.program().runs().size()));
  CHECK(seconds > 0);
  // The two GDN layers differ in their MLP alone: their projections are one row with two runs.
  const auto results = times.results();
  const auto rule = std::find_if(results.begin(), results.end(), [](const bench::OpTime& op) { return op.kind == model::OpKind::Rule && op.pass == "forward"; });
  REQUIRE(rule != results.end());
  CHECK(rule->runs == 2);
  CHECK(rule->work.flops > 0);
}

TEST_CASE("body: the layers alone, answered with the gradient of the mean square") {
  CpuDevice device;
  const config::Model model = fixture::hybrid();
  config::Run run = fixture::run();
  run.dtype = DType::FP32;
  const bench::BodyTimes plain = bench::bench_body(model, run, {}, device, device.memory(), 2);
  CHECK(plain.seconds.size() == 2);
  CHECK(plain.tokens == 80);
  CHECK(plain.activations > 0);
  CHECK(plain.arena >= plain.activations);
  // A residual stream of unit variance stays near it under small random weights.
  CHECK(plain.loss > 0.5);
  CHECK(plain.loss < 5);
  // The whole model keeps logits and embeddings besides.
  Session whole(model, run, device);
  whole.parameters().initialise(1);
  whole.use({});
  CHECK(plain.activations < whole.run(fixture::batches(model, run)).peak.bytes - whole.parameters().bytes().total());
  // Recompute lowers what is held and changes nothing else.
  plan::Setting experts;
  experts.granularity = config::Granularity::Selective;
  experts.modules = {"moe"};
  const bench::BodyTimes less = bench::bench_body(model, run, experts, device, device.memory(), 1);
  CHECK(less.loss == plain.loss);
  run.parallel.gpus = 2;
  CHECK_THROWS_AS(bench::bench_body(model, run, {}, device, device.memory(), 1), Error);
}

TEST_CASE("rule cases: documents hold the tokens of the sequences beside them") {
  for (const bench::RuleCase& c : bench::rule_cases()) {
    CHECK(c.tokens() == 32768);
    CHECK(*std::min_element(c.lengths.begin(), c.lengths.end()) > 0);
    CHECK(c.value_heads % c.key_heads == 0);
  }
  // 2^20 token-heads of two value heads a key head: 400 us forward, 1,473 us backward (kernels/gdn/NOTES.md).
  const bench::RuleCase million{"", 16, 32, {32768}};
  CHECK(million.millions() == 1);
  CHECK(bench::rule_floor(million, false, 4.2e12) == doctest::Approx(400e-6).scale(0).epsilon(0.01));
  CHECK(bench::rule_floor(million, true, 4.2e12) == doctest::Approx(1473e-6).scale(0).epsilon(0.01));
  const auto times = bench::time_rule_on_cpu({{"one", 1, 2, {70, 30}}}, 1, [](const bench::RuleTime&) {});
  REQUIRE(times.size() == 1);
  CHECK(times[0].forward > 0);
  CHECK(times[0].backward > 0);
}
