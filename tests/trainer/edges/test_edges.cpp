#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "engine/fixture.h"

// Routing and documents at their limits, on one rank.
using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// One layer whose router sees all experts alike: ties go to the lowest index, so every token goes to
// experts 0 and 1 of four.
struct Routed {
  config::Model model = fixture::model({LayerKind::Gdn}, {MlpKind::Moe});
  config::Run run;
  CpuDevice device;
  Session session;
  explicit Routed(const char* stack, std::optional<double> capacity = {}) : run(settings(stack, capacity)), session(model, run, device) {
    session.parameters().initialise(3);
    fill("layers.0.moe.router", 0);
    session.use({});
  }
  static config::Run settings(const char* stack, std::optional<double> capacity) {
    config::Run r = fixture::run();
    r.stack = stack;
    r.dtype = DType::FP32;
    r.moe_capacity_factor = capacity;
    r.settings.packed = true;
    return r;
  }
  void fill(const char* name, float value) {
    const size_t n = session.parameters().weights(name).size();
    session.parameters().set_weights(name, std::vector<float>(n, value));
  }
  // Weights of the experts from `first` on.
  void fill_experts(size_t first, float value) {
    for (const char* name : {"layers.0.moe.experts.fc1", "layers.0.moe.experts.fc2"}) {
      std::vector<float> w = session.parameters().weights(name);
      std::fill(w.begin() + static_cast<std::ptrdiff_t>(first * w.size() / 4), w.end(), value);
      session.parameters().set_weights(name, w);
    }
  }
  Trace trace() { return run_traced(session, fixture::batches(model, run)[0]); }
};

// Whether a token's row is the same in two layers' outputs, up to rounding.
bool same_row(const Trace& a, const Trace& b, size_t token, size_t hidden) {
  for (size_t c = token * hidden; c < (token + 1) * hidden; ++c)
    if (!(std::abs(a.hidden[1][c] - b.hidden[1][c]) <= 1e-6f * (1 + std::abs(a.hidden[1][c])))) return false;
  return true;
}

} // namespace

TEST_CASE("edges: experts without a row take no part, whatever is in their weights") {
  for (const char* stack : {"native", "megatron"}) {
    Routed plain(stack), poisoned(stack);
    poisoned.fill_experts(2, std::numeric_limits<float>::quiet_NaN());
    const StepResult a = plain.trace().result, b = poisoned.trace().result;
    CHECK(a.expert_load == std::vector<std::int64_t>{80, 80, 0, 0});
    CHECK(std::isfinite(a.loss));
    CHECK(a.loss == b.loss);
    for (const char* name : {"layers.0.moe.experts.fc1", "layers.0.moe.experts.fc2"}) {
      const std::vector<float> g = poisoned.session.parameters().gradient(name);
      CHECK(g == plain.session.parameters().gradient(name));
      CHECK(std::all_of(g.begin() + static_cast<std::ptrdiff_t>(g.size() / 2), g.end(), [](float x) { return x == 0; }));
      CHECK(std::any_of(g.begin(), g.begin() + static_cast<std::ptrdiff_t>(g.size() / 2), [](float x) { return x != 0; }));
    }
  }
}

TEST_CASE("edges: a bound that nothing exceeds changes nothing") {
  Routed free("native"), bounded("native", 2.0); // 80 * 2 / 4 * 2 = 80 rows an expert: exactly all tokens
  const Trace a = free.trace(), b = bounded.trace();
  CHECK(a.result.loss == doctest::Approx(b.result.loss).epsilon(1e-6));
  for (size_t t = 0; t < 80; ++t) CHECK(same_row(a, b, t, 32));
}

TEST_CASE("edges: an over-full expert drops the rows past its bound, and those alone") {
  Routed free("native"), without("native"), bounded("native", 0.5); // 20 rows for each expert, 80 come
  without.fill_experts(0, 0);
  const Trace all = free.trace(), none = without.trace(), some = bounded.trace();
  CHECK(some.result.expert_load == std::vector<std::int64_t>{80, 80, 0, 0}); // what the router wanted
  int routed = 0, dropped = 0;
  for (size_t t = 0; t < 80; ++t) {
    CHECK(!same_row(all, none, t, 32)); // or the next lines say nothing
    routed += same_row(some, all, t, 32);
    dropped += same_row(some, none, t, 32);
    if (t < 20) CHECK_MESSAGE(same_row(some, all, t, 32), "token " << t);
  }
  CHECK(routed == 20);
  CHECK(dropped == 60);
}

TEST_CASE("edges: an empty document in a batch is an error, a document of one token is none") {
  Routed r("native");
  Batch batch = fixture::batches(r.model, r.run)[0];
  batch.sequences = {0, 1, 80};
  CHECK(std::isfinite(r.session.run({batch}).loss));
  batch.sequences = {0, 30, 30, 80};
  CHECK_THROWS_WITH_AS(r.session.run({batch}), doctest::Contains("sequence offsets must strictly increase: 30 after 30"), Error);
  // And the session goes on.
  batch.sequences = {0, 30, 80};
  CHECK(std::isfinite(r.session.run({batch}).loss));
}
