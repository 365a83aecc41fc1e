#include <cmath>
#include <utility>

#include <doctest/doctest.h>

#include "fixture.h"
#include "plan/plan.h"
#include "trainer/decorated_device.h"

using namespace gdn;
using namespace gdn::trainer;

TEST_CASE("one step without recompute: finite, near the uniform entropy, memory as predicted at every event") {
  CpuDevice device;
  Session s(fixture::hybrid(), fixture::run(2), device);
  s.parameters().initialise(7);
  s.use({});
  const auto batches = fixture::batches(s.model(), s.run_settings());
  fixture::Outcome o = fixture::outcome(s, batches);
  CHECK(std::isfinite(o.result.loss));
  CHECK(o.result.loss == doctest::Approx(std::log(128.0)).epsilon(0.02));
  CHECK(o.result.valid == 2 * 79);
  for (size_t i = 0; i < o.gradients.size(); ++i) {
    double sum = 0;
    for (float g : o.gradients[i]) sum += std::abs(g);
    CAPTURE(s.parameters().slots()[i].name());
    CHECK(std::isfinite(sum));
    CHECK(sum > 0);
  }
}

TEST_CASE("a device that watches another sees every run, timed or not") {
  struct Watching final : DecoratedDevice {
    using DecoratedDevice::DecoratedDevice;
    void run(const OpCall& call) override {
      ++runs;
      inner_.run(call);
    }
    int runs = 0;
  };
  CpuDevice cpu;
  Watching device(cpu);
  Session s(fixture::hybrid(), fixture::run(1), device);
  s.parameters().initialise(7);
  s.use({});
  const auto batches = fixture::batches(s.model(), s.run_settings());
  s.run(batches);
  const int untimed = std::exchange(device.runs, 0);
  CHECK(untimed == static_cast<int>(s.program().runs().size()));
  Seconds taken = 0;
  s.run(batches, 0, 0, {.ran = [&](size_t, const OpCall&, Seconds seconds) { taken += seconds; }});
  CHECK(device.runs == untimed);
  CHECK(taken > 0);
}
