#include "program/summary.h"

#include <algorithm>
#include <optional>

namespace gdn::program {

namespace {

// Net changes before and after each event of [first, last), from buffer lifetimes.
struct Changes {
  std::vector<CategoryBytes> start, end;

  explicit Changes(size_t n) : start(n), end(n) {}
};

struct Life {
  int alloc, last; // clipped to a pass by the caller
};

// A buffer's lives: one, or two around a discard.
std::vector<Life> lives(const Buffer& b, int last) {
  if (b.drop < 0) return {{b.alloc, last}};
  if (b.refill < 0) return {{b.alloc, b.drop}};
  return {{b.alloc, b.drop}, {b.refill, last}};
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
    for (const Life& life : lives(b, last[i])) {
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

// Sweeps events [first, last) of a pass. `held`: sticky buffers live to the end of the pass.
PassSummary sweep(const UnitTrace& t, int first, int last, bool held) {
  const size_t n = static_cast<size_t>(last - first);
  std::vector<CategoryBytes> start(n), end(n);
  CategoryBytes level, handed_over;
  const bool forward = first == 0;
  auto is_sticky = [&](BufferId id) {
    return std::any_of(t.sticky.begin(), t.sticky.end(), [&](const auto& s) { return s.buffer == id; });
  };
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const Buffer& b = t.buffers[i];
    const BufferId id = static_cast<BufferId>(i);
    if (b.external) continue;
    const bool output = id == t.output, d_input = id == t.input_gradient, d_output = id == t.output_gradient;
    if (output && !forward) continue; // the next unit's input
    for (Life life : lives(b, b.last)) {
      if (d_output && forward) continue;
      if (life.last < first || life.alloc >= last) {
        // A sticky buffer that died before this pass is the schedule's business.
        continue;
      }
      if (output) life.last = last;             // handed over at exit
      if (d_input && !forward) life.last = last;
      const bool sticky_here = held && is_sticky(id) && life.alloc < last;
      if (sticky_here) life.last = std::max(life.last, last);
      const bool present = life.alloc < first || (d_output && life.alloc == first);
      if (present && (forward || d_output)) level[b.category] += b.bytes; // input at entry, d:output at entry
      else if (!present) start[static_cast<size_t>(life.alloc - first)][b.category] += b.bytes;
      if (life.last < last) end[static_cast<size_t>(life.last - first)][b.category] += b.bytes;
      else if ((output && forward) || (d_input && !forward)) handed_over[b.category] += b.bytes;
      else if (sticky_here && b.last < last) handed_over[b.category] += b.bytes; // kept by the attribute only
    }
  }
  PassSummary out;
  out.segments.emplace_back();
  // The level at entry counts even when nothing runs.
  out.segments.back().run.raise(level, 0, first);
  for (size_t e = 0; e < n; ++e) {
    level += start[e];
    const int event = first + static_cast<int>(e);
    const Event& running = t.events[static_cast<size_t>(event)];
    PassSummary::Segment& segment = out.segments.back();
    (running.pass == Pass::Replay ? segment.replay : segment.run).raise(level, running.scratch, event);
    if (std::any_of(t.sticky.begin(), t.sticky.end(), [&](const auto& s) { return s.event == event; })) {
      out.binds = true;
      out.segments.emplace_back();
      out.segments.back().run.raise(level - end[e], 0, event);
    }
    level -= end[e];
  }
  out.delta = level - handed_over;
  return out;
}

} // namespace

UnitSummary summarise(const UnitTrace& t) {
  UnitSummary s;
  const int n = static_cast<int>(t.events.size());
  s.forward = sweep(t, 0, t.forward_end, true);
  s.backward = sweep(t, t.forward_end, n, false);
  s.backward_held = sweep(t, t.forward_end, n, true);
  int binding = -1;
  for (const auto& st : t.sticky) {
    if (st.event >= t.forward_end) break; // replays bind the same storages in the same order
    if (st.event != binding) s.sticky.push_back(0);
    binding = st.event;
    const Buffer& b = t.buffers[static_cast<size_t>(st.buffer)];
    s.sticky.back() += b.bytes;
    s.sticky_crosses = b.last >= t.forward_end;
  }
  s.retained = s.forward.delta;
  if (t.input >= 0) s.input_bytes = t.buffers[static_cast<size_t>(t.input)].bytes;
  return s;
}

} // namespace gdn::program
