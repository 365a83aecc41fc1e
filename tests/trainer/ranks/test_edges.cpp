// Routing and documents at their limits on 2 ranks, and attention by exchanged heads.
#include <cmath>
#include <limits>

#include "core/error.h"
#include "tests/trainer/ranks/equality.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::ranks_test;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

// A router that sees all experts alike sends every token to experts 0 and 1 of four: both are those of expert
// rank 0, and rank 1 has no row. Without the losses on the routing it stays so.
Case one_sided(const char* stack) {
  Case c{hybrid(), run_of(stack, {.ep = 2, .gpus = 2})};
  c.model.moe.aux_loss_coeff = c.model.moe.z_loss_coeff = 0;
  c.prepare = [](Parameters& p) {
    for (const char* name : {"layers.0.moe.router", "layers.1.moe.router"})
      p.set_weights(name, std::vector<float>(p.weights(name).size(), 0));
  };
  return c;
}

} // namespace

TEST_CASE("edges of 2 ranks: all rows go to the experts of one") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal(one_sided(stack)); // moe_imbalance = 2: exactly what arrives
  }
}

// Without a balance loss the Megatron-style router sums no counts over the ranks that share the tokens: each adds its own.
TEST_CASE("edges of 2 ranks: the experts' load where ranks share tokens and nothing balances them") {
  for (const char* stack : kStacks)
    for (const Parallel& layout : {Parallel{.tp = 2, .ep = 2, .sequence_parallel = true, .gpus = 2}, Parallel{.cp = 2, .gpus = 2}}) {
      CAPTURE(stack);
      CAPTURE(layout.cp);
      Case c{hybrid(), run_of(stack, layout)};
      c.model.moe.aux_loss_coeff = 0;
      check_equal(c);
    }
}

TEST_CASE("edges of 2 ranks: an over-full expert drops the rows past its bound") {
  Case c = one_sided("native");
  c.run.moe_capacity_factor = 0.5; // 20 rows of every rank for each expert, 80 come
  c.run.moe_imbalance = 1;
  check_equal(c);
}

TEST_CASE("edges of 2 ranks: a context-parallel rank without a token of most documents") {
  for (const char* stack : kStacks) {
    Case c{hybrid(), run_of(stack, {.cp = 2, .gpus = 2})};
    c.run.settings.packed = true;
    c.edit = [](std::vector<Batch>& batches) { // pieces 1 and 2 of 4, [20, 60), are rank 1's
      for (Batch& b : batches) b.sequences = {0, 5, 20, 40, 41, 60, 80};
    };
    check_equal(c);
  }
}

TEST_CASE("edges of 2 ranks: an empty document is an error on every rank, and the session goes on") {
  for (const Parallel& layout : {Parallel{.cp = 2, .gpus = 2}, Parallel{.ep = 2, .gpus = 2}}) {
    const config::Model model = hybrid();
    config::Run run = run_of("native", layout, 2);
    run.settings.packed = true;
    CpuDevice device;
    const Ranks ranks(world(), layout);
    Session session(model, run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
    session.use(fixture::modules({}));
    session.parameters().initialise(7);
    std::vector<Batch> batches = fixture::batches(model, run);
    batches.back().sequences = {0, 30, 30, 80};
    CHECK_THROWS_WITH_AS(session.run(batches), doctest::Contains("sequence offsets must strictly increase: 30 after 30"), Error);
    batches.back().sequences = {0, 30, 80};
    CHECK(std::isfinite(session.run(batches).loss));
  }
}

TEST_CASE("edges of 2 ranks: heads exchanged for attention") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    Case c{hybrid(), run_of(stack, {.cp = 2, .gpus = 2}), {"moe"}};
    c.run.cp_comm_type = "a2a";
    check_equal(c);
    check_equal(packed(c.model, c.run));
  }
}

TEST_CASE("edges of 2 ranks: rings are refused") {
  for (const char* type : {"p2p", "a2a+p2p"}) {
    config::Run run = run_of("megatron", {.cp = 2, .gpus = 2});
    run.cp_comm_type = type;
    CpuDevice device;
    const Ranks ranks(world(), run.parallel);
    Session session(hybrid(), run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
    CHECK_THROWS_WITH_AS(session.use(fixture::modules({})), doctest::Contains("cp_comm_type all_gather or a2a"), Error);
  }
}
