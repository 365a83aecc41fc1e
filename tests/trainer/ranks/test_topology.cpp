// Who is where, and who holds what: by hand, and as partitions.
#include <doctest/doctest.h>

#include <algorithm>

#include "core/error.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/comm/token_shards.h"
#include "trainer/comm/topology.h"
#include "trainer/parameters.h"

using namespace gdn;
using namespace gdn::trainer;
using model::Group;

TEST_CASE("ranks are numbered tp, cp, dp, pp; experts etp, ep, edp, pp") {
  const Topology t({.tp = 2, .cp = 2, .pp = 2, .ep = 2, .etp = 2, .gpus = 16});
  const Place p = t.place(13); // 13 = 8 + 5, 5 = 1 + 2 (0 + 2 * 1)
  CHECK((p.tp == 1 && p.cp == 0 && p.dp == 1 && p.pp == 1 && p.etp == 1 && p.ep == 0 && p.edp == 1));
  CHECK(t.members(5, Group::Tp) == std::vector{4, 5});
  CHECK(t.members(5, Group::Cp) == std::vector{5, 7});
  CHECK(t.members(5, Group::Dp) == std::vector{1, 5});
  CHECK(t.members(5, Group::Pp) == std::vector{5, 13});
  CHECK(t.members(5, Group::Etp) == std::vector{4, 5});
  CHECK(t.members(5, Group::Ep) == std::vector{5, 7});
  CHECK(t.members(5, Group::Edp) == std::vector{1, 5});
  CHECK(t.dense_replicas(5) == std::vector{1, 3, 5, 7});
  CHECK(t.pipeline_ends(5) == std::vector{5, 13});
  CHECK_THROWS_WITH_AS(Topology({.tp = 3, .gpus = 8}), doctest::Contains("gpus: 8 ranks do not divide by tp x cp x pp = 3"), Error);
}

TEST_CASE("groups of one kind divide the ranks") {
  for (const config::Parallel& p : {config::Parallel{.tp = 2, .cp = 3, .pp = 2, .ep = 6, .gpus = 24}, config::Parallel{.tp = 4, .pp = 2, .ep = 2, .etp = 2, .gpus = 16}}) {
    const Topology t(p);
    for (Group g : {Group::Tp, Group::Cp, Group::Ep, Group::Etp, Group::Dp, Group::Edp, Group::Pp})
      for (int r = 0; r < static_cast<int>(t.size()); ++r) {
        const auto members = t.members(r, g);
        CHECK(static_cast<std::int64_t>(members.size()) == t.size_of(g));
        CHECK(std::find(members.begin(), members.end(), r) != members.end());
        for (int other : members) CHECK(t.members(other, g) == members);
      }
  }
}

TEST_CASE("zig-zag: rank r holds pieces r and 2 ranks - 1 - r, documents begin anywhere") {
  const std::vector<std::int64_t> sequences{0, 3, 8};
  const TokenShards a = token_shards(sequences, 1, 8, 2, 0), b = token_shards(sequences, 1, 8, 2, 1);
  CHECK(a.tokens == std::vector<std::vector<std::int64_t>>{{0, 1, 6, 7}, {2, 3, 4, 5}});
  CHECK(b.tokens == a.tokens);
  CHECK(a.sequences == std::vector<std::int64_t>{0, 2, 4});
  CHECK(a.positions == std::vector<std::int64_t>{0, 1, 3, 4});
  CHECK(b.sequences == std::vector<std::int64_t>{0, 1, 4});
  CHECK(b.positions == std::vector<std::int64_t>{2, 0, 1, 2});
  const TokenShards two = token_shards(std::vector<std::int64_t>{0, 4, 8}, 2, 4, 2, 0); // two rows of 4
  CHECK(two.tokens[0] == std::vector<std::int64_t>{0, 3, 4, 7});
  CHECK(two.positions == std::vector<std::int64_t>{0, 3, 0, 3});
  CHECK_THROWS_WITH_AS(token_shards(sequences, 1, 10, 2, 0), doctest::Contains("seq_length: 10 tokens do not divide into 2 x 2 pieces"), Error);
}

TEST_CASE("every element of a parameter is held once by the ranks that divide it") {
  config::Run run = trainer::fixture::run();
  run.vocab_divisor = 0;
  run.parallel = {.tp = 2, .ep = 2, .etp = 2, .sequence_parallel = true, .gpus = 4};
  const Topology t(run.parallel);
  for (const model::Parameter& p : model::parameter_table(trainer::fixture::hybrid(), run).parameters) {
    std::vector<int> held(static_cast<size_t>(p.elements()), 0);
    for (int r = 0; r < 4; ++r) {
      std::int64_t local = 0;
      for (const HeldStretch& h : held_stretches(p, run.parallel, t.place(r))) {
        CHECK(h.local == local);
        local += h.count;
        for (std::int64_t i = 0; i < h.count; ++i) ++held[static_cast<size_t>(h.global + i)];
      }
      CHECK(local == model::local_elements(p, run.parallel));
    }
    const bool expert = p.group == model::ParameterGroup::RoutedExpert;
    const int times = expert ? 1 : p.rule() == model::ShardRule::Replicated ? 4 : 2; // 4 ranks, tp 2, dp 2
    CAPTURE(p.name);
    CHECK(std::all_of(held.begin(), held.end(), [&](int n) { return n == times; }));
  }
}
