// What the ranks of every layout exchange, without any rank: members of a group list the same collectives in
// the same order with the same bytes; what one sends another receives.
#include <doctest/doctest.h>

#include <map>

#include "program/transfers.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/comm/topology.h"
#include "trainer/step_program.h"

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

constexpr int kMicroBatches = 4;

config::Model deep() {
  config::Model m = trainer::fixture::model({LayerKind::Gdn, LayerKind::Attention, LayerKind::Gdn2, LayerKind::Attention},
                                            {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe, MlpKind::Moe});
  m.gdn.key_heads = 4;
  m.gdn.value_heads = 8;
  m.mtp_layers = 1;
  return m;
}

struct Entry {
  model::CollectiveKind kind;
  std::string op;
  Bytes bytes;
  bool operator==(const Entry&) const = default;
};
using Lists = std::map<std::vector<int>, std::vector<Entry>>; // by members of the group

// Everything one rank exchanges in forward and backward, group by group.
Lists lists_of(const program::Program& p, const Topology& t, int rank) {
  Lists out;
  for (const program::Program::Run& run : p.runs()) {
    const program::UnitInstance& u = p.units()[static_cast<size_t>(run.unit)];
    const program::Event& e = u.trace->events[static_cast<size_t>(run.event)];
    const model::Op& op = u.list->ops[static_cast<size_t>(e.op)];
    for (const model::Collective& c : e.step < 0 ? op.collectives : op.steps[static_cast<size_t>(e.step)].collectives) {
      const std::vector<int> members = t.members(rank, c.group);
      CHECK(static_cast<std::int64_t>(members.size()) == c.ranks);
      out[members].push_back({c.kind, p.run_name(run), c.bytes});
    }
  }
  return out;
}

// Empty: all members agree. Else the first difference.
std::string disagreement(const std::vector<Lists>& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const auto& [members, list] : ranks[r])
      for (int other : members) {
        const auto theirs = ranks[static_cast<size_t>(other)].find(members);
        if (theirs == ranks[static_cast<size_t>(other)].end() || theirs->second != list)
          return "rank " + std::to_string(r) + " and " + std::to_string(other) + " differ from " + list.front().op;
      }
  return "";
}

struct Stage {
  program::Program program;
  std::vector<program::RunTransfers> moved;
};

// Each stage runs until it needs what has not been sent; sends never wait. Empty: everything was run and
// everything sent was received.
std::string stuck(const std::vector<Stage>& stages) {
  std::map<std::pair<int, int>, std::map<int, Bytes>> on_the_way; // (from, to) -> tag -> bytes
  std::vector<size_t> at(stages.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t s = 0; s < stages.size(); ++s)
      for (; at[s] < stages[s].moved.size(); ++at[s]) {
        const program::RunTransfers& run = stages[s].moved[at[s]];
        const int me = static_cast<int>(s);
        bool here = true;
        for (const program::Transfer& t : run.receives) here = here && on_the_way[{t.peer, me}].contains(t.tag);
        if (!here) break;
        for (const program::Transfer& t : run.receives) {
          if (on_the_way[{t.peer, me}][t.tag] != t.bytes) return "bytes differ";
          on_the_way[{t.peer, me}].erase(t.tag);
        }
        for (const program::Transfer& t : run.sends)
          if (!on_the_way[{me, t.peer}].emplace(t.tag, t.bytes).second) return "a tag is sent twice";
        progress = true;
      }
  }
  for (size_t s = 0; s < stages.size(); ++s)
    if (at[s] < stages[s].moved.size()) return "stage " + std::to_string(s) + " waits at " + stages[s].program.run_name(stages[s].program.runs()[at[s]]);
  for (const auto& [pair, messages] : on_the_way)
    if (!messages.empty()) return "a message is never received";
  return "";
}

// Each stage opens its routes in their order, and waits on each for the other end. Empty: all were opened, as wide as what goes there.
std::string unopened(const std::vector<Stage>& stages) {
  std::vector<std::vector<program::Route>> left;
  for (const Stage& s : stages) left.push_back(program::routes(s.moved));
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t a = 0; a < left.size(); ++a) {
      if (left[a].empty()) continue;
      const program::Route mine = left[a].front();
      auto& theirs = left[static_cast<size_t>(mine.peer)];
      if (!mine.sends || theirs.empty() || theirs.front().sends || theirs.front().peer != static_cast<int>(a) || theirs.front().tag != mine.tag) continue;
      if (theirs.front().largest != mine.largest) return "widths differ";
      left[a].erase(left[a].begin());
      theirs.erase(theirs.begin());
      progress = true;
    }
  }
  for (size_t s = 0; s < left.size(); ++s)
    if (!left[s].empty()) return "stage " + std::to_string(s) + " waits for " + std::to_string(left[s].front().peer);
  return "";
}

const Parallel kLayouts[] = {
    {.gpus = 4},
    {.ep = 2, .gpus = 4},
    {.ep = 4, .gpus = 4},
    {.etp = 2, .gpus = 4},
    {.ep = 2, .etp = 2, .gpus = 4},
    {.tp = 2, .sequence_parallel = true, .gpus = 2},
    {.tp = 4, .etp = 2, .sequence_parallel = true, .gpus = 4},
    {.tp = 2, .ep = 2, .sequence_parallel = true, .gpus = 4},
    {.cp = 2, .gpus = 2},
    {.cp = 2, .pp = 2, .vp = 2, .gpus = 4},
    {.tp = 2, .cp = 2, .sequence_parallel = true, .gpus = 4},
    {.cp = 4, .ep = 2, .gpus = 4},
    {.tp = 2, .cp = 2, .ep = 4, .sequence_parallel = true, .gpus = 8},
    {.pp = 2, .gpus = 2},
    {.pp = 4, .gpus = 4},
    {.pp = 2, .vp = 2, .gpus = 4},
    {.tp = 2, .pp = 2, .vp = 2, .ep = 2, .sequence_parallel = true, .gpus = 8},
    {.tp = 2, .cp = 2, .pp = 2, .ep = 4, .sequence_parallel = true, .gpus = 16},
};

} // namespace

TEST_CASE("members of a group list the same collectives; sends match receives") {
  for (const char* stack : {"megatron", "native"})
    for (const Parallel& parallel : kLayouts)
      for (const std::vector<std::string>& modules : {std::vector<std::string>{}, {"moe"}}) {
        const config::Model m = deep();
        config::Run run = trainer::fixture::run();
        run.stack = stack;
        run.parallel = parallel;
        // Both ways: by all-gather without modules, by heads with one, where heads divide.
        run.cp_comm_type = modules.empty() || m.attention.kv_heads % (parallel.tp * parallel.cp) != 0 ? "all_gather" : "a2a";
        run.vocab_divisor = 0;
        run.moe_imbalance = 2;
        run.global_batch = kMicroBatches * parallel.dp();
        CAPTURE(stack);
        CAPTURE(parallel.tp);
        CAPTURE(parallel.pp);
        plan::Workload workload(m, run, cpu_provider());
        const Topology topology(parallel);
        std::vector<Stage> stages;
        for (int s = 0; s < static_cast<int>(parallel.pp); ++s) {
          program::Program p = step_program(workload, trainer::fixture::modules(modules), kMicroBatches, s);
          auto moved = program::transfers(p, static_cast<int>(parallel.pp), s, static_cast<int>(parallel.vp), kMicroBatches);
          stages.push_back({std::move(p), std::move(moved)});
        }
        std::vector<Lists> ranks;
        for (int r = 0; r < static_cast<int>(topology.size()); ++r)
          ranks.push_back(lists_of(stages[static_cast<size_t>(topology.place(r).pp)].program, topology, r));
        CHECK(disagreement(ranks) == "");
        CHECK(stuck(stages) == "");
        CHECK(unopened(stages) == "");
        size_t sent = 0;
        for (const Stage& s : stages)
          for (const auto& run_moves : s.moved) sent += run_moves.sends.size();
        CHECK(sent == static_cast<size_t>(2 * (parallel.pp * parallel.vp - 1) * kMicroBatches * (parallel.pp > 1))); // there and back
      }
}

TEST_CASE("the checks can fail") {
  config::Run run = trainer::fixture::run(kMicroBatches);
  run.parallel = {.pp = 2, .gpus = 2};
  const config::Model m = deep();
  plan::Workload workload(m, run, cpu_provider());
  std::vector<Stage> stages;
  for (int s = 0; s < 2; ++s) {
    program::Program p = step_program(workload, {}, kMicroBatches, s);
    auto moved = program::transfers(p, 2, s, 1, kMicroBatches);
    stages.push_back({std::move(p), std::move(moved)});
  }
  CHECK(stuck(stages) == "");
  CHECK(unopened(stages) == "");
  CHECK(program::routes(stages[0].moved).size() == 2); // activations there, gradients back
  for (auto& moves : stages[0].moved)
    if (!moves.sends.empty()) {
      moves.sends.clear();
      break;
    }
  CHECK(stuck(stages).find("waits at") != std::string::npos);
  std::swap(stages[0], stages[1]);
  CHECK(unopened(stages).find("waits for") != std::string::npos);
  std::vector<Lists> two(2);
  two[0][{0, 1}] = {{model::CollectiveKind::AllReduce, "a", 4}, {model::CollectiveKind::AllGather, "b", 4}};
  two[1][{0, 1}] = {{model::CollectiveKind::AllGather, "b", 4}, {model::CollectiveKind::AllReduce, "a", 4}};
  CHECK(disagreement(two) == "rank 0 and 1 differ from a");
}
