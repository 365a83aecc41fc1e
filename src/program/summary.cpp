#include "program/summary.h"

#include <algorithm>
#include <optional>

namespace gdn::program {

namespace {

struct Interval {
  int alloc, last; // clipped to a pass by the caller
};

// A buffer's lives: one, or two around a discard.
struct Lives {
  Interval life[2];
  size_t count;
  const Interval* begin() const { return life; }
  const Interval* end() const { return life + count; }
};

Lives lives(const Buffer& b, int last) {
  if (b.drop < 0) return {{{b.alloc, last}, {}}, 1};
  if (b.refill < 0) return {{{b.alloc, b.drop}, {}}, 1};
  return {{{b.alloc, b.drop}, {b.refill, last}}, 2};
}

// Last event of every buffer, attributes included: the op's next run, or the end, overwrites them.
std::vector<int> ends_with_attributes(const UnitTrace& t) {
  std::vector<int> last;
  for (const Buffer& b : t.buffers) last.push_back(b.last);
  auto storage = [&](BufferId id) { return t.list->tensor(t.buffers[static_cast<size_t>(id)].tensor).storage; };
  for (const auto& s : t.sticky) {
    int until = static_cast<int>(t.events.size());
    for (const auto& next : t.sticky)
      if (next.event > s.event && storage(next.buffer) == storage(s.buffer)) until = std::min(until, next.event);
    last[static_cast<size_t>(s.buffer)] = std::max(last[static_cast<size_t>(s.buffer)], until);
  }
  return last;
}

} // namespace

Levels levels(const UnitTrace& t) {
  const size_t n = t.events.size();
  std::vector<CategoryBytes> start(n), end(n);
  CategoryBytes level;
  const std::vector<int> last = ends_with_attributes(t);
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const Buffer& b = t.buffers[i];
    if (b.external) continue;
    for (const Interval& life : lives(b, last[i])) {
      if (life.last < 0) continue; // an input that nothing reads
      if (life.alloc < 0) level[b.category] += b.bytes;
      else if (life.alloc < static_cast<int>(n)) start[static_cast<size_t>(life.alloc)][b.category] += b.bytes;
      if (life.last < static_cast<int>(n)) end[static_cast<size_t>(life.last)][b.category] += b.bytes;
    }
  }
  Levels out;
  for (size_t e = 0; e < n; ++e) {
    level += start[e];
    const Event& event = t.events[e];
    Peak& peak = event.pass == Pass::Forward ? out.forward : event.pass == Pass::Replay ? out.replay : out.backward;
    peak.raise(level, event.scratch, static_cast<int>(e));
    out.at_event.push_back(level.total() + event.scratch);
    level -= end[e];
    out.after.push_back(level.total());
  }
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const Buffer& b = t.buffers[i];
    if (static_cast<BufferId>(i) != t.output && !b.gradient && b.alloc < t.forward_end && last[i] >= t.forward_end && b.drop < 0)
      out.retained += b.bytes;
  }
  return out;
}

namespace {

model::StorageId storage_of(const UnitTrace& t, BufferId id) {
  return t.list->tensor(t.buffers[static_cast<size_t>(id)].tensor).storage;
}

// Event in [first, last) that takes an attribute away from the buffer that `binding` gave it; -1: none.
int next_binding(const UnitTrace& t, const UnitTrace::Sticky& binding, int last) {
  int next = -1;
  for (const auto& s : t.sticky)
    if (s.event > binding.event && s.event < last && storage_of(t, s.buffer) == storage_of(t, binding.buffer) &&
        (next < 0 || s.event < next))
      next = s.event;
  return next;
}

// Sweeps events [first, last) of a pass. Attributes bound in it keep their buffers to its end.
PassSummary sweep(const UnitTrace& t, int first, int last) {
  const size_t n = static_cast<size_t>(last - first);
  std::vector<CategoryBytes> change(n + 1); // when event e begins: what it makes, less what the one before leaves
  CategoryBytes level, handed_over;
  const bool forward = first == 0;
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const Buffer& b = t.buffers[i];
    const BufferId id = static_cast<BufferId>(i);
    if (b.external) continue;
    const bool output = id == t.output, d_input = id == t.input_gradient, d_output = id == t.output_gradient;
    if (forward ? d_output : output) continue; // of the backward pass; the next unit's input
    const Lives mine = lives(b, b.last);
    for (size_t l = 0; l < mine.count; ++l) {
      Interval life = mine.life[l];
      if (life.last < first || life.alloc >= last) continue;
      if (forward ? output : d_input) life.last = last; // handed over at exit
      bool attribute = false;
      if (l + 1 == mine.count && (b.drop < 0 || b.refill >= 0)) // not of a dropped buffer
        for (const auto& s : t.sticky)
          if (s.buffer == id && s.event >= first && s.event < last) {
            const int next = next_binding(t, s, last);
            attribute = next < 0 && life.last < last;
            life.last = std::max(life.last, next < 0 ? last : next);
          }
      const bool present = life.alloc < first || (d_output && life.alloc == first);
      if (present && (forward || d_output)) level[b.category] += b.bytes; // input or d:output at entry
      else if (!present) change[static_cast<size_t>(life.alloc - first)][b.category] += b.bytes;
      if (life.last < last) change[static_cast<size_t>(life.last - first) + 1][b.category] -= b.bytes;
      else if (output || attribute || !forward) handed_over[b.category] += b.bytes; // not this unit's any more
    }
  }
  PassSummary out;
  out.first_event = first;
  for (size_t e = 0; e < n; ++e) {
    level += change[e];
    const int event = first + static_cast<int>(e);
    const Event& running = t.events[static_cast<size_t>(event)];
    const bool replayed = running.pass == Pass::Replay;
    (replayed ? out.replay : out.run).raise(level, running.scratch, event);
    if (!t.sticky.empty()) {
      out.levels.push_back(level);
      out.levels.back()[Category::Workspace] += running.scratch;
      out.replayed.push_back(replayed);
    }
  }
  level += change[n];
  out.delta = level - handed_over;
  return out;
}

// What an attribute does in a pass that binds it.
Attribute::Use use(const UnitTrace& t, model::StorageId storage, int first, int last) {
  Attribute::Use out;
  for (const auto& s : t.sticky) {
    if (storage_of(t, s.buffer) != storage || s.event < first || s.event >= last) continue;
    if (out.bound < 0) out.bound = s.event - first;
    if (next_binding(t, s, last) >= 0) continue;
    const Buffer& b = t.buffers[static_cast<size_t>(s.buffer)];
    const bool dropped = b.drop >= s.event && b.drop < last;
    if (!b.external && !dropped && b.last < last) out.after[b.category] += b.bytes;
  }
  return out;
}

} // namespace

UnitSummary summarise(const UnitTrace& t) {
  UnitSummary s;
  const int n = static_cast<int>(t.events.size());
  s.forward = sweep(t, 0, t.forward_end);
  s.backward = sweep(t, t.forward_end, n);
  for (const auto& binding : t.sticky) {
    if (binding.event >= t.forward_end) break;
    const model::StorageId storage = storage_of(t, binding.buffer);
    const Buffer& b = t.buffers[static_cast<size_t>(binding.buffer)];
    Attribute a{use(t, storage, 0, t.forward_end), use(t, storage, t.forward_end, n)};
    if (!b.external && b.drop < 0 && b.last >= t.forward_end) {
      a.held[b.category] = b.bytes;
      a.own_end = b.last - t.forward_end;
    }
    s.attributes.push_back(a);
  }
  s.retained = s.forward.delta;
  if (t.input >= 0) s.input_bytes = t.buffers[static_cast<size_t>(t.input)].bytes;
  return s;
}

} // namespace gdn::program
