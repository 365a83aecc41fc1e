#include "trainer/executor.h"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/ranks.h"

namespace gdn::trainer {

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every float type, -1 in every integer type
constexpr unsigned char kGuardByte = 0xa5;

const program::Event& event_of(const program::Program& program, const Script::Line& line) {
  return program.units()[static_cast<size_t>(line.unit)].trace->events[static_cast<size_t>(line.event)];
}

} // namespace

Script script(const program::Program& program, const program::Layout& layout) {
  Script s{.lines = {}, .extent = layout.extent, .guard = layout.guard};
  for (size_t r = 0; r < program.runs().size(); ++r) {
    const program::Program::Run& run = program.runs()[r];
    Script::Line line{run.unit, run.micro_batch, run.event, {}, run.frees, 0, layout.scratch[r]};
    for (size_t i = 0; i < run.allocs.size(); ++i) line.acquires.push_back({run.allocs[i], layout.allocs[r][i]});
    line.scratch = event_of(program, line).scratch;
    s.lines.push_back(std::move(line));
  }
  return s;
}

Script script(const program::Program& program, const program::Layout& layout, const config::Parallel& p, std::int64_t pipeline_rank,
              int micro_batches) {
  Script s = script(program, layout);
  const auto moved = program::transfers(program, static_cast<int>(p.pp), static_cast<int>(pipeline_rank), static_cast<int>(p.vp), micro_batches);
  for (size_t r = 0; r < s.lines.size(); ++r) {
    s.lines[r].receives = moved[r].receives;
    s.lines[r].sends = moved[r].sends;
  }
  return s;
}

Executor::Executor(const program::Program& program, Script script, Device& device, Parameters& parameters, Ledger& ledger,
                   Checks checks, bool foreign)
    : program_(program), script_(std::move(script)), device_(device), parameters_(parameters), ledger_(ledger),
      checks_(checks), held_(program.buffers().size()) {
  Bytes most = 1;
  for (const program::UnitInstance& unit : program.units()) {
    auto& ops = slots_.emplace_back();
    for (const model::Op& op : unit.list->ops) {
      device_.check_runs(op);
      for (int step = -1; foreign && step < static_cast<int>(op.steps.size()); ++step)
        most = std::max(most, device_.provider().work(*unit.list, op, step).scratch);
      auto& slots = ops.emplace_back();
      for (const model::ParamRef& p : op.params) slots.push_back(&parameters_.resolve(unit.prefix, p));
    }
  }
  if (foreign) own_scratch_ = DeviceMemory(device, most, "the scratch of the device's own ops");
  arena_ = DeviceMemory(device, arena_bytes(script_), "the arena of activations, gradients and scratch");
}

Bytes Executor::arena_bytes(const Script& script) { return std::max<Bytes>(script.extent, 1); }

std::string Executor::line_name(const Script::Line& line) const {
  const program::UnitInstance& u = program_.units()[static_cast<size_t>(line.unit)];
  return fmt::format("{}{} #mb{}", u.prefix, u.trace->event_name(line.event, *u.spans), line.micro_batch);
}

void Executor::run(const StepContext& context, const Observer& observer) {
  base_ = ledger_.live();
  device_.begin_step(context);
  const int allocations = device_.allocations();
  try {
    for (size_t i = 0; i < script_.lines.size(); ++i) run_line(i, context, observer);
    device_.end_step(context);
  } catch (...) {
    abandon();
    throw;
  }
  if (device_.allocations() != allocations)
    throw Error(ErrorCode::Internal, fmt::format("{} allocations happened inside a step", device_.allocations() - allocations));
  if (checks_.equality && ledger_.live() != base_) {
    const Bytes left = ledger_.total() - base_.total();
    abandon();
    throw Error(ErrorCode::Internal, fmt::format("{} bytes are still held after the step", left));
  }
}

void Executor::run_line(size_t index, const StepContext& context, const Observer& observer) {
  const Script::Line& line = script_.lines[index];
  const std::string name = line_name(line);
  ledger_.mark(&name);
  for (const Script::Acquire& a : line.acquires) acquire(a);
  std::span<std::byte> scratch;
  if (line.scratch > 0) {
    scratch = {arena_.data() + line.scratch_offset, static_cast<size_t>(line.scratch)};
    scratch_ticket_ = ledger_.acquire(name, Category::Workspace, line.scratch);
    set_guards(scratch.data(), line.scratch);
  }
  if (checks_.equality) compare(index);
  for (const program::Transfer& t : line.receives)
    context.ranks->group(model::Group::Pp).receive(t.peer, t.tag, held_[static_cast<size_t>(t.buffer)].data, t.bytes);

  const std::span<std::byte> usable =
      own_scratch_.data() ? std::span(own_scratch_.data(), static_cast<size_t>(own_scratch_.bytes())) : scratch;
  OpCall c = call(line, usable, context);
  Seconds seconds = 0;
  try {
    if (observer.ran) seconds = device_.run_timed(c);
    else device_.run(c);
  } catch (const Error& e) { // a bound that was planned too small: which layer's
    if (e.code() != ErrorCode::DoesNotFit) throw;
    throw Error(e.code(), fmt::format("{}: {}", name, e.what()), e.hint());
  }
  c.check_all_used();
  if (observer.ran) observer.ran(index, c, seconds);

  if (scratch_ticket_ >= 0) {
    check_guards(scratch.data(), line.scratch, "the scratch of " + name);
    ledger_.release(std::exchange(scratch_ticket_, -1));
  }
  if (checks_.poison)
    for (const OpCall::Operand& o : c.operands()) {
      int id = program_.buffer(line.unit, line.micro_batch, o.access.buffer);
      check_guards(o.buffer, held_[static_cast<size_t>(id)].bytes, program_.buffer_name(id) + " in " + name);
    }
  for (const program::Transfer& t : line.sends)
    context.ranks->group(model::Group::Pp).send(t.peer, t.tag, held_[static_cast<size_t>(t.buffer)].data, t.bytes);
  for (int id : line.releases) release(id);
  ledger_.mark(nullptr);
  if (observer.released) observer.released(index);
}

void Executor::acquire(const Script::Acquire& a) {
  Held& h = held_[static_cast<size_t>(a.buffer)];
  if (h.data) throw Error(ErrorCode::Internal, fmt::format("'{}' is acquired twice", program_.buffer_name(a.buffer)));
  const program::Program::Buffer& b = program_.buffers()[static_cast<size_t>(a.buffer)];
  h = {arena_.data() + a.offset, b.bytes, -1};
  if (!b.external) h.ticket = ledger_.acquire(program_.buffer_name(a.buffer), b.category, b.bytes);
  set_guards(h.data, h.bytes);
}

void Executor::release(int buffer) {
  Held& h = held_[static_cast<size_t>(buffer)];
  if (!h.data) throw Error(ErrorCode::Internal, fmt::format("'{}' is released but not held", program_.buffer_name(buffer)));
  if (checks_.poison) {
    check_guards(h.data, h.bytes, program_.buffer_name(buffer));
    device_.fill(h.data, h.bytes, kPoison);
  }
  if (h.ticket >= 0) ledger_.release(h.ticket);
  h = {};
}

void Executor::abandon() {
  for (Held& h : held_) {
    if (h.ticket >= 0) ledger_.release(h.ticket);
    h = {};
  }
  if (scratch_ticket_ >= 0) ledger_.release(std::exchange(scratch_ticket_, -1));
  ledger_.mark(nullptr);
}

OpCall Executor::call(const Script::Line& line, std::span<std::byte> scratch, const StepContext& context) {
  const program::UnitInstance& unit = program_.units()[static_cast<size_t>(line.unit)];
  const program::UnitTrace& trace = *unit.trace;
  const program::Event& event = event_of(program_, line);
  const model::Op& op = unit.list->ops[static_cast<size_t>(event.op)];
  std::vector<OpCall::Operand> operands;
  for (std::uint32_t i = 0; i < event.access_count; ++i) {
    const program::Access& a = trace.accesses[event.first_access + i];
    const int id = program_.buffer(line.unit, line.micro_batch, a.buffer);
    const Held& h = held_[static_cast<size_t>(id)];
    if (!h.data)
      throw Error(ErrorCode::Internal, fmt::format("{} uses '{}', which is not held", line_name(line), program_.buffer_name(id)));
    operands.push_back({a, h.data, trace.buffers[static_cast<size_t>(a.buffer)].tensor});
  }
  std::vector<OpCall::Parameter> parameters;
  for (size_t i = 0; i < op.params.size(); ++i) {
    ParameterSlot& slot = *slots_[static_cast<size_t>(line.unit)][static_cast<size_t>(event.op)][i];
    OpCall::Parameter p{slot.value(), {}};
    if (event.step >= 0)
      for (int g : op.steps[static_cast<size_t>(event.step)].param_grads)
        if (g == static_cast<int>(i) && op.params[i].trainable) p.gradient = slot.gradient_view();
    parameters.push_back(p);
  }
  return OpCall(*unit.list, event, std::move(operands), std::move(parameters), scratch, context, line.micro_batch,
                tables_[{line.unit, line.micro_batch}]);
}

void Executor::compare(size_t index) const {
  const CategoryBytes measured = ledger_.live() - base_;
  const CategoryBytes& predicted = program_.runs()[index].by;
  if (measured == predicted) return;
  std::string rows;
  for (int c = 0; c < kCategoryCount; ++c)
    if (auto i = static_cast<size_t>(c); measured.by[i] != predicted.by[i])
      rows += fmt::format(" {}: held {}, predicted {};", name_of(static_cast<Category>(c)), measured.by[i], predicted.by[i]);
  throw Error(ErrorCode::Internal,
              fmt::format("memory differs from the prediction in {}:{}", line_name(script_.lines[index]), rows));
}

void Executor::set_guards(std::byte* data, Bytes bytes) {
  if (!checks_.poison) return;
  device_.fill(data, bytes, kPoison);
  device_.fill(data - script_.guard, script_.guard, kGuardByte);
  device_.fill(data + bytes, script_.guard, kGuardByte);
}

void Executor::check_guards(const std::byte* data, Bytes bytes, const std::string& what) const {
  if (!checks_.poison) return;
  if (device_.holds(data - script_.guard, script_.guard, kGuardByte) && device_.holds(data + bytes, script_.guard, kGuardByte)) return;
  throw Error(ErrorCode::Internal, fmt::format("something wrote outside {}", what));
}

} // namespace gdn::trainer
