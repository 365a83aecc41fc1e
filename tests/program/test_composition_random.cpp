#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <set>

#include <fmt/core.h>

#include "core/error.h"
#include "program/program.h"
#include "tests/program/compare.h"

using namespace gdn;
using program::Pass;
using program::Slot;

namespace {

// A unit of a random chunk; equal layers share one.
struct Unit {
  toy::Case c;
  program::UnitTrace trace;
  program::UnitSummary summary;
};

// The chunks of one pipeline rank, in model order: unit indices by chunk.
struct Model {
  std::vector<std::shared_ptr<Unit>> units;
  std::vector<int> chunk_of;
  int chunks = 0;

  std::vector<brute::Unit> plain() const {
    std::vector<brute::Unit> out;
    for (size_t i = 0; i < units.size(); ++i) out.push_back({&units[i]->c.list, &units[i]->c.spans, units[i]->c.options, chunk_of[i]});
    return out;
  }
  std::vector<std::vector<const program::UnitSummary*>> summaries() const {
    std::vector<std::vector<const program::UnitSummary*>> out(static_cast<size_t>(chunks));
    for (size_t i = 0; i < units.size(); ++i) out[static_cast<size_t>(chunk_of[i])].push_back(&units[i]->summary);
    return out;
  }
  std::vector<program::UnitInstance> instances() const {
    std::vector<program::UnitInstance> out;
    for (size_t i = 0; i < units.size(); ++i)
      out.push_back({&units[i]->c.list, &units[i]->c.spans, &units[i]->trace, chunk_of[i], fmt::format("L{:02}.", i)});
    return out;
  }
  int unit_in_chunk(int index) const {
    return static_cast<int>(std::count(chunk_of.begin(), chunk_of.begin() + index, chunk_of[static_cast<size_t>(index)]));
  }
  std::string dump() const {
    std::string text;
    for (size_t i = 0; i < units.size(); ++i) text += fmt::format("unit {}, chunk {}, {}", i, chunk_of[i], toy::dump(units[i]->c));
    return text;
  }
};

// A unit that takes and gives gradients as its neighbours expect; none when the seed makes no such one.
std::shared_ptr<Unit> unit(std::uint64_t seed, toy::Flavour flavour, bool input_gradient) {
  flavour.chain = true;
  auto u = std::make_shared<Unit>();
  u->c = toy::random_case(seed, flavour);
  u->c.options = {};
  u->c.options.input_gradient = input_gradient;
  try {
    u->trace = program::trace(u->c.list, u->c.spans, toy::hashed_scratch(), u->c.options);
  } catch (const Error&) {
    return nullptr;
  }
  const bool unread = u->trace.input >= 0 && u->trace.buffers[static_cast<size_t>(u->trace.input)].last < 0;
  if (unread || (u->trace.input >= 0 && input_gradient != (u->trace.input_gradient >= 0))) return nullptr;
  u->summary = program::summarise(u->trace);
  return u;
}

// Chunks of one to four units. The first may start from data, the last may end in the loss; layers
// repeat. `frozen`: the first chunk's input wants no gradient.
Model random_model(std::uint64_t seed, int chunks, bool next_forward, bool frozen) {
  toy::Random random(seed);
  Model m;
  m.chunks = chunks;
  std::uint64_t next = seed * 1000;
  for (int c = 0; c < chunks; ++c) {
    bool gradient = !(frozen && c == 0);
    const int n = random.between(1, 4);
    for (int i = 0; i < n; ++i) {
      toy::Flavour flavour{.next_forward = next_forward};
      flavour.source = c == 0 && i == 0 && random.chance(0.5);
      flavour.sink = c == chunks - 1 && i == n - 1 && random.chance(0.5);
      std::shared_ptr<Unit> u;
      if (i > 0 && !flavour.source && !flavour.sink && random.chance(0.3) && m.units.back()->trace.input >= 0 &&
          m.units.back()->c.options.input_gradient == gradient)
        u = m.units.back();
      while (!u) u = unit(next++, flavour, gradient && !flavour.source);
      m.units.push_back(u);
      m.chunk_of.push_back(c);
      gradient = u->trace.output_gradient >= 0;
    }
  }
  return m;
}

// Where composed, flat and executed levels first differ.
std::string difference(const Model& m, const std::vector<Slot>& slots, int micro_batches) {
  const brute::Execution x = brute::execute(m.plain(), slots, toy::hashed_scratch());
  const program::Program flat(m.instances(), slots, micro_batches);
  for (size_t i = 0; i < std::min(x.samples.size(), flat.runs().size()); ++i) {
    const brute::Sample& s = x.samples[i];
    const program::Program::Run& r = flat.runs()[i];
    const program::Event& e = m.units[static_cast<size_t>(r.unit)]->trace.events[static_cast<size_t>(r.event)];
    if (r.unit != s.unit || r.micro_batch != s.micro_batch || e.op != s.op || e.step != s.step || e.pass != s.pass)
      return fmt::format("run {} is not {}", i, flat.run_name(r));
    if (r.level != s.level) {
      std::string live;
      for (int id : x.live[i]) live += " " + x.names[static_cast<size_t>(id)];
      std::set<int> held;
      for (size_t j = 0; j <= i; ++j) {
        if (j > 0)
          for (int id : flat.runs()[j - 1].frees) held.erase(id);
        held.insert(flat.runs()[j].allocs.begin(), flat.runs()[j].allocs.end());
      }
      std::string flat_live;
      for (int id : held) flat_live += " " + flat.buffer_name(id);
      return fmt::format("flat run {} ({}): level {} is {}\n  live:{}\n  flat:{}", i, flat.run_name(r), s.level, r.level, live, flat_live);
    }
    if (r.by != s.by) return fmt::format("flat run {} ({}): categories", i, flat.run_name(r));
  }
  if (x.samples.size() != flat.runs().size()) return "number of runs";

  // Every prefix of the schedule, so that a difference shows where it begins.
  size_t done = 0;
  program::Peak overall, forward, backward, replay;
  CategoryBytes base;
  base[Category::Parameters] = 12345;
  for (size_t k = 0; k < slots.size(); ++k) {
    for (; done < x.samples.size() && done < x.slot_ends[k]; ++done) {
      const brute::Sample& s = x.samples[done];
      overall.raise(s.by, 0, static_cast<int>(done));
      (s.pass == Pass::Forward ? forward : s.pass == Pass::Replay ? replay : backward).raise(s.by, 0, static_cast<int>(done));
    }
    const std::vector<Slot> prefix(slots.begin(), slots.begin() + static_cast<long>(k) + 1);
    const program::Walk walk = program::walk(m.summaries(), prefix, base);
    const std::string where = fmt::format("composed, after slot {} ({} of micro-batch {}, chunk {})", k, program::name_of(slots[k].pass),
                                          slots[k].micro_batch, slots[k].chunk);
    if (walk.end_level != x.slot_levels[k]) return fmt::format("{}: level {} is {}", where, x.slot_levels[k], walk.end_level);
    const std::tuple<const char*, const program::Peak*, const program::StepPeak*> peaks[] = {
        {"overall", &overall, &walk.overall}, {"forward", &forward, &walk.forward}, {"backward", &backward, &walk.backward}, {"replay", &replay, &walk.replay}};
    for (auto [name, truth, composed] : peaks) {
      if (truth->event < 0) continue; // nothing has run
      if (composed->bytes != truth->bytes + base.total())
        return fmt::format("{}: {} peak {} at run {} is {}", where, name, truth->bytes, truth->event, composed->bytes - base.total());
      // Of several equal peaks any may be named; its categories must be those of its event.
      const brute::Sample* named = nullptr;
      for (size_t i = composed->slot > 0 ? x.slot_ends[static_cast<size_t>(composed->slot) - 1] : 0; i < done; ++i)
        if (!named && m.unit_in_chunk(x.samples[i].unit) == composed->unit && flat.runs()[i].event == composed->event) named = &x.samples[i];
      if (!named || named->level != truth->bytes) return fmt::format("{}: {} peak's event", where, name);
      if (composed->by != named->by + base) return fmt::format("{}: {} peak by category", where, name);
    }
  }
  return {};
}

} // namespace

TEST_CASE("composed = flat = executed: several units, chunks and micro-batches in 1F1B order") {
  int checked = 0, interleaved = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    toy::Random random(seed);
    const int pp = random.between(1, 4), vp = random.chance(0.4) ? random.between(2, 3) : 1;
    const int rank = random.below(pp), micro_batches = random.between(1, 3) * (vp > 1 ? pp : 1);
    const bool attributes = random.chance(0.5);
    const Model m = random_model(seed, vp, attributes, random.chance(0.15));
    const std::vector<Slot> slots = program::one_f_one_b(pp, rank, vp, micro_batches);
    const std::string found = difference(m, slots, micro_batches);
    if (!found.empty()) FAIL_CHECK(fmt::format("seed {}, pp {}, rank {}, vp {}, {} micro-batches\n{}{}", seed, pp, rank, vp, micro_batches, m.dump(), found));
    ++checked;
    interleaved += vp > 1;
  }
  CHECK(checked == 600);
  CHECK(interleaved >= 100);
}

TEST_CASE("a schedule runs every pass once, forward first, with the stated number in flight") {
  for (int pp = 1; pp <= 4; ++pp)
    for (int rank = 0; rank < pp; ++rank)
      for (int vp = 1; vp <= 3; ++vp)
        for (int m : {1, 2, 3, 4, 8, 12}) {
          if (vp > 1 && m % pp != 0) continue;
          std::vector<std::vector<int>> state(static_cast<size_t>(vp), std::vector<int>(static_cast<size_t>(m), 0));
          int in_flight = 0, most = 0;
          for (const Slot& s : program::one_f_one_b(pp, rank, vp, m)) {
            int& one = state[static_cast<size_t>(s.chunk)][static_cast<size_t>(s.micro_batch)];
            CHECK(one == (s.pass == Pass::Forward ? 0 : 1));
            ++one;
            in_flight += s.pass == Pass::Forward ? 1 : -1;
            most = std::max(most, in_flight);
          }
          for (const auto& chunk : state) CHECK(std::all_of(chunk.begin(), chunk.end(), [](int n) { return n == 2; }));
          // One chunk: min(m, pp - rank). Interleaved: the warm-up and the forward that follows it.
          const int warm_up = std::min(m * vp, 2 * (pp - rank - 1) + (vp - 1) * pp);
          CHECK(most == (vp == 1 ? std::min(m, pp - rank) : std::min(m * vp, warm_up + 1)));
        }
}

TEST_CASE("the shortened schedule has the peak of the long one") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    toy::Random random(seed + 5000);
    const int pp = random.between(1, 4), vp = random.chance(0.5) ? random.between(2, 3) : 1, rank = random.below(pp);
    const int m = vp > 1 ? pp * random.between(1, 14) : random.between(1, 40);
    const Model model = random_model(seed + 5000, vp, random.chance(0.5), false);
    auto peak = [&](int micro_batches) {
      return program::walk(model.summaries(), program::one_f_one_b(pp, rank, vp, micro_batches), {}).overall.bytes;
    };
    CAPTURE(seed);
    CAPTURE(m);
    CHECK(peak(program::steady_micro_batches(pp, vp, m)) == peak(m));
  }
}
