#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "model/builder.h"
#include "tests/program/compare.h"

using namespace gdn;
using namespace gdn::model;

TEST_CASE("trace and levels equal an autograd execution with checkpoints, on random lists") {
  int executed = 0, refused = 0, replayed = 0, nested = 0, groups = 0, views = 0;
  for (std::uint64_t seed = 0; seed < 6000; ++seed) {
    toy::Case c = toy::random_case(seed, {.legal = seed % 4 != 0});
    std::string what;
    const std::string difference = brute::difference(c, toy::hashed_scratch(), &what);
    if (!difference.empty()) FAIL_CHECK(toy::dump(c) << difference);
    (what == "ok" ? executed : refused)++;
    if (what != "ok") continue;
    const brute::Execution x = brute::execute_alone(c.list, c.spans, toy::hashed_scratch(), c.options);
    replayed += std::any_of(x.samples.begin(), x.samples.end(), [](const auto& s) { return s.pass == program::Pass::Replay; });
    views += std::any_of(c.list.tensors.begin(), c.list.tensors.end(), [](const Tensor& t) { return t.base >= 0; });
    bool inner = false, group = false;
    for (const Span& a : c.spans)
      for (const Span& b : c.spans) {
        if (&a == &b) continue;
        inner = inner || (a.first <= b.first && b.last <= a.last);
        group = group || (a.hook >= 0 && a.hook == b.hook);
      }
    nested += inner;
    groups += group;
  }
  // The generator must keep reaching what the comparison is about.
  CHECK(executed >= 4000);
  CHECK(refused >= 500);
  CHECK(replayed >= 2000);
  CHECK(nested >= 1000);
  CHECK(groups >= 250);
  CHECK(views >= 3000);
}

// ---------------------------------------------------------------- a comparison that can fail ----

namespace {

// Scratch of a wrapped provider, without that of one op and step.
class WithoutOneScratch : public Provider {
public:
  WithoutOneScratch(std::string op, int step) : op_(std::move(op)), step_(step) {}
  std::string_view name() const override { return "mutated"; }
  Work work(const OpList& list, const Op& op, int step) const override {
    return op.name == op_ && step == step_ ? Work{} : toy::hashed_scratch().work(list, op, step);
  }

private:
  std::string op_;
  int step_;
};

// Whether engine (mutated side) and execution (original) are found unequal.
bool seen(const toy::Case& original, const toy::Case& mutated, const Provider& provider = toy::hashed_scratch()) {
  const brute::Execution x = brute::execute_alone(original.list, original.spans, toy::hashed_scratch(), original.options);
  try {
    return !brute::difference(program::trace(mutated.list, mutated.spans, provider, mutated.options), mutated.spans, x).empty();
  } catch (const Error&) {
    return true;
  }
}

// x -> a, s -> b, u -> out, t; every tensor has one last reader or holder.
toy::Case three_ops() {
  Builder b("three");
  TensorId x = b.input("x", DType::BF16, {4, 10});
  TensorId a = b.tensor("a", DType::BF16, {4, 21}), s = b.statistic("s", DType::FP32, {4, 3});
  b.op("op0", OpKind::Toy, {x}, {a, s}).params = {{"w0", 8}};
  b.list().ops.back().steps = {{.name = "dgrad", .reads = {s}, .grad_reads = {a}, .grad_writes = {x}},
                               {.name = "wgrad", .reads = {x}, .grad_reads = {a}, .param_grads = {0}}};
  TensorId v = b.tensor("b", DType::BF16, {4, 32}), u = b.statistic("u", DType::FP32, {4, 5}), k = b.statistic("k", DType::FP32, {4, 9});
  b.op("op1", OpKind::Toy, {a}, {v, u, k}).params = {{"w1", 8}};
  b.list().ops.back().steps = {{.name = "backward", .reads = {a}, .grad_reads = {v}, .grad_writes = {a}, .param_grads = {0}}};
  TensorId out = b.tensor("out", DType::BF16, {4, 10}), t = b.statistic("t", DType::FP32, {4, 7});
  b.op("op2", OpKind::Toy, {v}, {out, t}).params = {{"w2", 8}};
  b.list().ops.back().steps = {{.name = "dgrad", .grad_reads = {out}, .grad_writes = {v}},
                               {.name = "wgrad", .reads = {v}, .grad_reads = {out}, .param_grads = {0}}};
  b.list().ops.back().pins = {{t, "held"}};
  b.hold(u, HoldKind::Frame, 2);
  b.hold(out, HoldKind::Caller);
  b.hold(k, HoldKind::NextForward);
  return {0, b.finish(out, 4), {}, {}};
}

// Every scratch is there, so each one can be missed.
class AllScratch : public Provider {
public:
  std::string missing_op;
  int missing_step = -2;
  std::string_view name() const override { return "all"; }
  Work work(const OpList&, const Op& op, int step) const override {
    Work w;
    if (op.name != missing_op || step != missing_step) w.scratch = 100000 + 10 * (step + 1);
    return w;
  }
};

} // namespace

TEST_CASE("every single read, pin, hold and scratch of a list is missed when it is gone") {
  const toy::Case c = three_ops();
  REQUIRE_FALSE(seen(c, c));
  int mutations = 0;
  auto check = [&](const std::string& what, const std::function<void(toy::Case&)>& mutate) {
    toy::Case m = c;
    mutate(m);
    CAPTURE(what);
    CHECK(seen(c, m));
    ++mutations;
  };
  for (size_t i = 0; i < c.list.ops.size(); ++i) {
    for (size_t s = 0; s < c.list.ops[i].steps.size(); ++s) {
      const Step& step = c.list.ops[i].steps[s];
      for (size_t r = 0; r < step.reads.size(); ++r)
        check("read", [&](toy::Case& m) { m.list.ops[i].steps[s].reads.erase(m.list.ops[i].steps[s].reads.begin() + static_cast<long>(r)); });
      for (size_t r = 0; r < step.grad_writes.size(); ++r)
        check("gradient", [&](toy::Case& m) { m.list.ops[i].steps[s].grad_writes.clear(); });
      check("step", [&](toy::Case& m) { m.list.ops[i].steps.erase(m.list.ops[i].steps.begin() + static_cast<long>(s)); });
    }
    for (size_t p = 0; p < c.list.ops[i].pins.size(); ++p) check("pin", [&](toy::Case& m) { m.list.ops[i].pins.clear(); });
    if (c.list.ops[i].steps.size() > 1) // op1's one step runs anyway
      check("frozen", [&](toy::Case& m) { m.list.ops[i].params[0].trainable = false; });
  }
  for (size_t h = 0; h < c.list.holds.size(); ++h)
    check("hold", [&](toy::Case& m) { m.list.holds.erase(m.list.holds.begin() + static_cast<long>(h)); });
  for (size_t s = 0; s < c.list.storages.size(); ++s)
    check("bytes", [&](toy::Case& m) { m.list.storages[s].bytes += 2; });
  check("external", [&](toy::Case& m) { m.list.storages[0].external = true; });
  CHECK(mutations >= 25);

  AllScratch whole;
  const brute::Execution x = brute::execute_alone(c.list, c.spans, whole, c.options);
  CHECK(brute::difference(program::trace(c.list, c.spans, whole, c.options), c.spans, x).empty());
  for (const Op& op : c.list.ops)
    for (int step = -1; step < static_cast<int>(op.steps.size()); ++step) {
      AllScratch less;
      less.missing_op = op.name;
      less.missing_step = step;
      CAPTURE(op.name);
      CAPTURE(step);
      CHECK_FALSE(brute::difference(program::trace(c.list, c.spans, less, c.options), c.spans, x).empty());
    }
}

TEST_CASE("on random lists a mutation of any kind is seen sooner or later") {
  struct Kind {
    const char* name;
    double share; // of the mutated lists on which it must be seen; many reads are not anybody's last
    std::function<bool(toy::Case&, toy::Random&)> mutate; // false: nothing there to mutate
  };
  auto any_step = [](toy::Case& c, toy::Random& r, auto member) -> bool {
    for (int tries = 0; tries < 20; ++tries) {
      Op& op = c.list.ops[static_cast<size_t>(r.below(static_cast<int>(c.list.ops.size())))];
      if (op.steps.empty()) continue;
      auto& list = op.steps[static_cast<size_t>(r.below(static_cast<int>(op.steps.size())))].*member;
      if (list.empty()) continue;
      list.erase(list.begin() + r.below(static_cast<int>(list.size())));
      return true;
    }
    return false;
  };
  auto hold_of = [](HoldKind kind) {
    return [kind](toy::Case& c, toy::Random&) {
      auto it = std::find_if(c.list.holds.begin(), c.list.holds.end(), [&](const Hold& h) { return h.kind == kind; });
      if (it == c.list.holds.end()) return false;
      c.list.holds.erase(it);
      return true;
    };
  };
  auto span = [](auto change) {
    return [change](toy::Case& c, toy::Random& r) {
      if (c.spans.empty()) return false;
      change(c.spans[static_cast<size_t>(r.below(static_cast<int>(c.spans.size())))]);
      return true;
    };
  };
  const Kind kinds[] = {
      {"read", 0.2, [&](toy::Case& c, toy::Random& r) { return any_step(c, r, &Step::reads); }},
      {"gradient written", 0.2, [&](toy::Case& c, toy::Random& r) { return any_step(c, r, &Step::grad_writes); }},
      {"frame", 0.1, hold_of(HoldKind::Frame)},
      {"caller", 0.3, hold_of(HoldKind::Caller)},
      {"next forward", 0.3, hold_of(HoldKind::NextForward)},
      {"pin", 0.05, [](toy::Case& c, toy::Random&) {
         bool any = false;
         for (Op& op : c.list.ops) any = any || !op.pins.empty(), op.pins.clear();
         return any;
       }},
      {"parameter frozen", 0.05, [](toy::Case& c, toy::Random&) {
         for (Op& op : c.list.ops)
           for (ParamRef& p : op.params)
             if (p.trainable) return p.trainable = false, true;
         return false;
       }},
      {"span gone", 0.5, [](toy::Case& c, toy::Random&) { return !c.spans.empty() && (c.spans.pop_back(), true); }},
      {"checkpoint holds", 0.2, span([](Span& s) { s.holds = !s.holds; })},
      {"replay extent", 0.1, span([](Span& s) { s.extent = s.extent == ReplayExtent::All ? ReplayExtent::Needed : ReplayExtent::All; })},
  };
  for (const Kind& kind : kinds) {
    int tried = 0, found = 0;
    for (std::uint64_t seed = 0; seed < 400; ++seed) {
      const toy::Case c = toy::random_case(seed * 7 + 1);
      std::string what;
      if (brute::difference(c, toy::hashed_scratch(), &what); what != "ok") continue;
      toy::Case m = c;
      toy::Random random(seed);
      if (!kind.mutate(m, random)) continue;
      ++tried;
      found += seen(c, m);
    }
    CAPTURE(kind.name);
    CAPTURE(tried);
    CAPTURE(found);
    CHECK(tried >= 30);
    CHECK(found >= kind.share * tried);
  }
  int tried = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) { // a scratch that is there is always seen missing
    const toy::Case c = toy::random_case(seed * 7 + 1);
    std::string what;
    if (brute::difference(c, toy::hashed_scratch(), &what); what != "ok") continue;
    for (const Op& op : c.list.ops) {
      if (toy::hashed_scratch().work(c.list, op, -1).scratch == 0) continue;
      CHECK(seen(c, c, WithoutOneScratch(op.name, -1)));
      ++tried;
    }
  }
  CHECK(tried >= 100);
}
