#include <cmath>
#include <utility>

#include <doctest/doctest.h>

#include "core/error.h"
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

// Connections between ranks take memory that was free when the budget was asked for.
TEST_CASE("a step is laid out in what is free, where that is less than the budget") {
  struct Crowded final : DecoratedDevice {
    using DecoratedDevice::DecoratedDevice;
    MemoryNow memory_now() override { return {0, free}; }
    Bytes free = Bytes{1} << 40;
  };
  CpuDevice cpu;
  Crowded device(cpu);
  Session s(fixture::hybrid(), fixture::run(1), device);
  s.use({});
  const Bytes arena = s.arena_bytes();
  device.free = arena;
  CHECK_NOTHROW(s.use({}));
  device.free = arena - 1;
  const std::string there = format_bytes(arena - 1 + s.parameters().bytes().total()) + " may be used";
  auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.code() == ErrorCode::DoesNotFit ? e.what() : "";
    }
    return "";
  };
  CHECK(message([&] { s.use({}); }).find(there) != std::string::npos);
  device.free = 1;
  CHECK(message([&] { Session(fixture::hybrid(), fixture::run(1), device); }).find("1 B may be used") != std::string::npos);
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
