#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "core/error.h"
#include "fixture.h"
#include "trainer/cpu/ops.h"

// The executor's checks must be able to fail: one thing is taken away at a time, and each time the run
// must end in an error.
using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// One step of a model on lists that the test may change, under given spans.
struct Rig {
  config::Model model;
  config::Run run;
  CpuDevice device;
  Ledger ledger;
  Alone world;
  Ranks ranks;
  plan::Workload workload;
  Parameters parameters;
  std::vector<plan::PlacedUnit> placed;
  std::vector<Batch> batches;

  Rig(config::Model m, const std::string& stack, std::vector<std::string> modules, config::CrossEntropy loss = config::CrossEntropy::Unfused)
      : model(std::move(m)), run(fixture::run()), ranks(world, (set_up(run, stack, loss), run.parallel)),
        workload(model, run, device.provider()), parameters(model, run, device, ledger, ranks) {
    parameters.initialise(5);
    for (const model::Chunk& c : model::chunks_of_rank(model.layers(), run.parallel, 0))
      for (const plan::PlacedUnit& u : workload.units(c, fixture::modules(std::move(modules)))) placed.push_back(u);
    batches = fixture::batches(model, run);
  }
  static void set_up(config::Run& r, const std::string& stack, config::CrossEntropy loss) {
    r.seq = 10;
    r.stack = stack;
    r.cross_entropy = loss;
    if (loss == config::CrossEntropy::ChunkedLinear) r.loss_chunk = 4;
  }

  // Unit `changed` runs `list` instead of its own.
  program::Program program(size_t changed, const model::OpList* list, program::UnitTrace& trace) {
    std::vector<program::UnitInstance> units;
    for (size_t u = 0; u < placed.size(); ++u) {
      const plan::TracedUnit& t = *placed[u].unit;
      program::UnitInstance unit{t.list, &t.spans, &t.trace, 0, placed[u].first_layer < 0 ? "" : fmt::format("layers.{}.", placed[u].first_layer)};
      if (list && u == changed) {
        program::TraceOptions options;
        options.input_gradient = u > 0;
        trace = program::trace(*list, t.spans, device.provider(), options);
        unit.list = list;
        unit.trace = &trace;
      }
      units.push_back(unit);
    }
    return program::Program(std::move(units), program::one_f_one_b(1, 0, 1, 1), 1);
  }
  Script script_of(const program::Program& p) {
    program::LayoutOptions options;
    options.guard = kGuard;
    return script(p, program::lay_out(p, options));
  }

  double execute(const program::Program& p, Script s, Checks checks = {}) {
    StepTotals totals;
    std::vector<MicroBatch> views{{batches[0].ids, batches[0].labels, batches[0].sequences, 0}};
    StepContext context{0, 0, views, 1.0 / 9, 1, &totals};
    Executor executor(p, std::move(s), device, parameters, ledger, checks);
    executor.run(context);
    return totals.loss_sum;
  }

  // Loss and gradients of one step, or nothing where it ended in an error.
  struct Numbers {
    double loss = 0;
    std::vector<std::vector<float>> gradients;
    friend bool operator==(const Numbers&, const Numbers&) = default; // a NaN equals nothing
  };
  std::optional<Numbers> numbers(const program::Program& p, Script s, Checks checks = {}) {
    parameters.zero_gradients();
    try {
      Numbers n{execute(p, std::move(s), checks), {}};
      for (const ParameterSlot& slot : parameters.slots()) n.gradients.push_back(parameters.gradient(slot.name()));
      return n;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  // Runs a changed list; whether an error ended it.
  bool fails(size_t unit, const model::OpList& list, std::string* why = nullptr) {
    try {
      program::UnitTrace trace;
      const program::Program p = program(unit, &list, trace);
      execute(p, script_of(p));
    } catch (const Error& e) {
      if (why) *why = e.what();
      return true;
    }
    return false;
  }
};

config::Model both_kinds() {
  config::Model m = fixture::model({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense});
  m.gdn.conv_bias = true;
  return m;
}
config::Model gdn2() { return fixture::model({LayerKind::Gdn2}, {MlpKind::Moe}); }

std::string key(const model::Op& op, int step) {
  return fmt::format("{}/{}", model::name_of(op.kind), step < 0 ? "forward" : op.steps[static_cast<size_t>(step)].name);
}

config::Model multi_token() {
  config::Model m = fixture::model({LayerKind::Attention}, {MlpKind::Moe});
  m.mtp_layers = 1;
  return m;
}

struct Variant {
  const char* name;
  std::string stack;
  config::Model (*model)();
  std::vector<std::string> modules;
  config::CrossEntropy loss = config::CrossEntropy::Unfused;
};
std::vector<Variant> variants() {
  using config::CrossEntropy;
  return {{"megatron", "megatron", both_kinds, {}},
          {"megatron, recompute", "megatron", both_kinds, {"gdn_qkv", "gdn_norm_out", "moe"}},
          {"native", "native", both_kinds, {}},
          {"megatron gdn2", "megatron", gdn2, {}},
          {"native gdn2", "native", gdn2, {}},
          {"megatron MTP, fused loss", "megatron", multi_token, {}, CrossEntropy::FusedTe},
          {"megatron MTP, chunked loss", "megatron", multi_token, {}, CrossEntropy::ChunkedLinear},
          {"native MTP, chunked loss", "native", multi_token, {}, CrossEntropy::ChunkedLinear}};
}

// Every kind that one rank executes, and how it must show up in the mutations. Exchanges need several
// ranks; conv and silu apart are Megatron's deterministic form, which is priced and not executed.
std::set<model::OpKind> executed_kinds() {
  using enum model::OpKind;
  std::set<model::OpKind> kinds;
  for (int k = 0; k < static_cast<int>(Toy); ++k) kinds.insert(static_cast<model::OpKind>(k));
  for (model::OpKind k : {AllToAll, AllGather, ReduceScatter, AllReduce, Dispatch, CombineDispatch, Conv, Silu}) kinds.erase(k);
  return kinds;
}
void check_covers(const std::set<model::OpKind>& met, std::set<model::OpKind> without = {}) {
  for (model::OpKind k : executed_kinds())
    if (!without.contains(k)) {
      CAPTURE(std::string(model::name_of(k)));
      CHECK(met.contains(k));
    }
}

} // namespace

TEST_CASE("unchanged, every variant runs") {
  for (const Variant& v : variants()) {
    CAPTURE(std::string(v.name));
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    program::UnitTrace unused;
    const program::Program p = rig.program(0, nullptr, unused);
    CHECK(std::isfinite(rig.execute(p, rig.script_of(p))));
  }
}

TEST_CASE("one read taken away from a backward step or a forward op") {
  std::set<std::string> kinds;
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    std::set<std::string> done;
    for (size_t u = 0; u < rig.placed.size(); ++u) {
      const model::OpList& original = *rig.placed[u].unit->list;
      for (size_t i = 0; i < original.ops.size(); ++i)
        for (size_t s = 0; s < original.ops[i].steps.size(); ++s)
          for (size_t r = 0; r < original.ops[i].steps[s].reads.size(); ++r) {
            const std::string what = fmt::format("{}/{}", key(original.ops[i], static_cast<int>(s)), r);
            if (!done.insert(what).second) continue;
            model::OpList mutant = original;
            auto& reads = mutant.ops[i].steps[s].reads;
            reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(r));
            CAPTURE(std::string(v.name));
            CAPTURE(what);
            CHECK(rig.fails(u, mutant));
            kinds.insert(key(original.ops[i], static_cast<int>(s)));
          }
    }
  }
  CHECK(kinds.size() > 25);
}

TEST_CASE("every kind that is executed is met") {
  std::set<model::OpKind> met;
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    for (const plan::PlacedUnit& u : rig.placed)
      for (const model::Op& op : u.unit->list->ops) met.insert(op.kind);
  }
  check_covers(met);
}

TEST_CASE("one input, output or saved tensor withheld from an op or step") {
  std::set<model::OpKind> met;
  for (const Variant& v : variants()) {
    if (!v.modules.empty()) continue;
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    std::set<std::string> done;
    for (size_t u = 0; u < rig.placed.size(); ++u) {
      const plan::TracedUnit& unit = *rig.placed[u].unit;
      for (size_t e = 0; e < unit.trace.events.size(); ++e) {
        const program::Event& event = unit.trace.events[e];
        const model::Op& op = unit.list->ops[static_cast<size_t>(event.op)];
        if (op.kind == model::OpKind::View) continue; // runs nothing
        for (std::uint32_t a = 0; a < event.access_count; ++a) { // inputs, outputs, saved tensors
          if (unit.trace.accesses[event.first_access + a].gradient) continue; // may be absent: nobody made it
          const std::string what = fmt::format("{}/{}", key(op, event.step), a);
          if (!done.insert(what).second) continue;
          program::UnitTrace trace;
          const program::Program p = rig.program(u, unit.list, trace);
          // The op is told of one access less; everything else, lives and bytes included, stays.
          auto& accesses = trace.accesses;
          const std::uint32_t at = trace.events[e].first_access;
          std::swap(accesses[at + a], accesses[at + event.access_count - 1]);
          --trace.events[e].access_count;
          CAPTURE(std::string(v.name));
          CAPTURE(what);
          CHECK_THROWS_AS(rig.execute(p, rig.script_of(p)), Error);
          met.insert(op.kind);
        }
      }
    }
  }
  check_covers(met, {model::OpKind::View});
}

TEST_CASE("a read declared but never used") {
  Rig rig(both_kinds(), "megatron", {});
  model::OpList mutant = *rig.placed[1].unit->list;
  const int op = mutant.find_op("conv1d");
  mutant.ops[static_cast<size_t>(op)].steps[0].reads.push_back(mutant.ops[static_cast<size_t>(op)].outputs[0]);
  std::string why;
  CHECK(rig.fails(1, mutant, &why));
  CHECK(why.find("does not use it") != std::string::npos);
}

TEST_CASE("one release, one acquire, one scratch entry taken away, per op kind") {
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    program::UnitTrace unused;
    const program::Program p = rig.program(0, nullptr, unused);
    const Script original = rig.script_of(p);
    std::set<std::string> done;
    auto mutate = [&](const char* what, size_t line, auto change) {
      const program::UnitInstance& u = p.units()[static_cast<size_t>(original.lines[line].unit)];
      const program::Event& e = u.trace->events[static_cast<size_t>(original.lines[line].event)];
      const std::string name = fmt::format("{} of {}", what, key(u.list->ops[static_cast<size_t>(e.op)], e.step));
      if (!done.insert(name).second) return;
      Script mutant = original;
      change(mutant.lines[line]);
      CAPTURE(std::string(v.name));
      CAPTURE(name);
      CHECK_THROWS_AS(rig.execute(p, std::move(mutant)), Error);
    };
    for (size_t i = 0; i < original.lines.size(); ++i) {
      const Script::Line& line = original.lines[i];
      if (i > 0 && !line.releases.empty()) { // the life of what this line frees ends a line early
        const int id = line.releases.front();
        const bool older = std::none_of(line.acquires.begin(), line.acquires.end(), [&](const auto& a) { return a.buffer == id; });
        const program::UnitInstance& u = p.units()[static_cast<size_t>(line.unit)];
        const program::Event& e = u.trace->events[static_cast<size_t>(line.event)];
        if (older && done.insert("early release in " + key(u.list->ops[static_cast<size_t>(e.op)], e.step)).second) {
          Script mutant = original;
          std::erase(mutant.lines[i].releases, id);
          mutant.lines[i - 1].releases.push_back(id);
          CHECK_THROWS_AS(rig.execute(p, std::move(mutant)), Error);
        }
      }
      if (!line.releases.empty()) mutate("release", i, [](Script::Line& l) { l.releases.pop_back(); });
      if (!line.acquires.empty()) mutate("acquire", i, [](Script::Line& l) { l.acquires.pop_back(); });
      if (line.scratch > 0) mutate("scratch", i, [](Script::Line& l) { l.scratch = 0; });
      // Even when the ledger were told the truth about less scratch, the op would not find it.
      if (line.scratch > 0) mutate("smaller scratch", i, [](Script::Line& l) { l.scratch -= 1; });
    }
    CHECK(done.size() > 30);
  }
}

TEST_CASE("an op that writes past its buffer") {
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    std::set<std::string> done;
    for (size_t u = 0; u < rig.placed.size(); ++u) {
      const model::OpList& original = *rig.placed[u].unit->list;
      for (size_t i = 0; i < original.ops.size(); ++i)
        for (model::TensorId t : original.ops[i].outputs) {
          if (original.tensor(t).base >= 0 || original.tensor(t).dtype == DType::Bool) continue; // Bool: one byte an element
          const std::string what = key(original.ops[i], -1);
          if (!done.insert(what).second) continue;
          model::OpList mutant = original;
          mutant.storages[static_cast<size_t>(mutant.tensor(t).storage)].bytes -= 2;
          CAPTURE(std::string(v.name));
          CAPTURE(what);
          std::string why;
          CHECK(rig.fails(u, mutant, &why));
          CAPTURE(why);
          CHECK(why.find("wrote outside") != std::string::npos);
        }
    }
  }
}

TEST_CASE("two buffers in one place: the numbers change, whatever the ledger says") {
  size_t ran = 0;
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    program::UnitTrace unused;
    const program::Program p = rig.program(0, nullptr, unused);
    const Script original = rig.script_of(p);
    const auto base = rig.numbers(p, original);
    REQUIRE(base);
    std::map<int, size_t> last_read; // buffer -> last line that reads it
    for (size_t i = 0; i < original.lines.size(); ++i) {
      const Script::Line& line = original.lines[i];
      const program::UnitTrace& trace = *p.units()[static_cast<size_t>(line.unit)].trace;
      const program::Event& e = trace.events[static_cast<size_t>(line.event)];
      const model::Op& op = trace.list->ops[static_cast<size_t>(e.op)];
      if (op.kind == model::OpKind::View || op.kind == model::OpKind::Gdn2Rule) continue; // name memory they do not read
      for (std::uint32_t a = 0; a < e.access_count; ++a)
        if (const program::Access& x = trace.accesses[e.first_access + a]; x.mode == program::AccessMode::Read)
          last_read[p.buffer(line.unit, line.micro_batch, x.buffer)] = i;
    }
    std::set<std::string> done;
    std::map<int, Bytes> held;
    for (size_t i = 0; i < original.lines.size(); ++i) {
      const Script::Line& line = original.lines[i];
      const program::UnitTrace& trace = *p.units()[static_cast<size_t>(line.unit)].trace;
      const program::Event& e = trace.events[static_cast<size_t>(line.event)];
      if (!line.acquires.empty())
        for (const auto& [id, offset] : held)
          if (auto at = last_read.find(id); at != last_read.end() && at->second > i && // someone still reads it
              p.buffers()[static_cast<size_t>(id)].bytes >= p.buffers()[static_cast<size_t>(line.acquires[0].buffer)].bytes) {
            if (!done.insert(key(trace.list->ops[static_cast<size_t>(e.op)], e.step)).second) break;
            Script mutant = original;
            mutant.lines[i].acquires[0].offset = offset;
            CAPTURE(std::string(v.name));
            CAPTURE(p.buffer_name(id));
            CAPTURE(p.buffer_name(line.acquires[0].buffer));
            const auto changed = rig.numbers(p, std::move(mutant));
            CHECK((!changed || !(*changed == *base)));
            ++ran;
            break;
          }
      for (const Script::Acquire& a : line.acquires) held[a.buffer] = a.offset;
      for (int id : line.releases) held.erase(id);
    }
  }
  CHECK(ran > 100);
}

TEST_CASE("an op that does not run leaves poison that reaches loss or gradients, for every kind that makes no indices") {
  std::set<model::OpKind> met, indices{model::OpKind::View, model::OpKind::LossSum, model::OpKind::RouterLoss};
  Checks checks;
  checks.equality = false; // poison alone must be enough
  for (const Variant& v : variants()) {
    Rig rig(v.model(), v.stack, v.modules, v.loss);
    program::UnitTrace unused;
    const program::Program p = rig.program(0, nullptr, unused);
    const Script original = rig.script_of(p);
    const auto base = rig.numbers(p, original);
    REQUIRE(base);
    std::set<std::string> done;
    for (size_t i = 0; i + 1 < original.lines.size(); ++i) {
      const program::UnitInstance& u = p.units()[static_cast<size_t>(original.lines[i].unit)];
      const program::Event& e = u.trace->events[static_cast<size_t>(original.lines[i].event)];
      const model::Op& op = u.list->ops[static_cast<size_t>(e.op)];
      if (op.kind == model::OpKind::View || e.step >= 0 || op.outputs.empty()) continue; // renames; no forward output
      if (std::any_of(op.outputs.begin(), op.outputs.end(), [&](model::TensorId t) {
            const DType dtype = u.list->tensor(t).dtype;
            return dtype != DType::BF16 && dtype != DType::FP32;
          })) {
        indices.insert(op.kind); // poisoned indices address anything at all
        continue;
      }
      if (!done.insert(key(op, e.step)).second) continue;
      Script mutant = original; // the next line acquires in its place
      auto& next = mutant.lines[i + 1].acquires;
      next.insert(next.begin(), mutant.lines[i].acquires.begin(), mutant.lines[i].acquires.end());
      for (int id : mutant.lines[i].releases) mutant.lines[i + 1].releases.push_back(id);
      mutant.lines.erase(mutant.lines.begin() + static_cast<std::ptrdiff_t>(i));
      CAPTURE(std::string(v.name));
      CAPTURE(op.name);
      const auto changed = rig.numbers(p, std::move(mutant), checks);
      CHECK((!changed || !(*changed == *base)));
      met.insert(op.kind);
    }
  }
  check_covers(met, indices);
}

TEST_CASE("the table of CPU functions: an empty entry says why") {
  for (int k = 0; k <= static_cast<int>(model::OpKind::Toy); ++k) {
    const auto kind = static_cast<model::OpKind>(k);
    const cpu::OpFunctions& f = cpu::functions_of(kind);
    CAPTURE(model::name_of(kind));
    CHECK((f.forward != nullptr) == f.reason.empty());
  }
}
