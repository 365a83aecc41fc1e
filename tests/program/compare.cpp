#include "tests/program/compare.h"

#include <optional>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::brute {

using program::AccessMode;
using program::Pass;

namespace {

std::string gradient_modes(const program::UnitTrace& t, const program::Event& e) {
  std::string modes;
  for (std::uint32_t i = e.first_access; i < e.first_access + e.access_count; ++i) {
    const program::Access& a = t.accesses[i];
    if (a.gradient && a.mode != AccessMode::Read) modes += a.mode == AccessMode::Write ? 'w' : 'a';
  }
  return modes;
}

// '?' of the execution (a region covered in part) matches either mode.
bool same_modes(const std::string& engine, const std::string& truth) {
  if (engine.size() != truth.size()) return false;
  for (size_t i = 0; i < truth.size(); ++i)
    if (truth[i] != '?' && truth[i] != engine[i]) return false;
  return true;
}

// What is live during event i for the engine.
std::string live(const program::UnitTrace& t, int i) {
  std::vector<std::string> names;
  for (size_t id = 0; id < t.buffers.size(); ++id) {
    const program::Buffer& b = t.buffers[id];
    const bool dropped = b.drop >= 0 && i > b.drop && (b.refill < 0 || i < b.refill);
    if (!b.external && !dropped && b.alloc <= i && i <= b.last) names.push_back(t.buffer_name(static_cast<program::BufferId>(id)));
  }
  return fmt::format("{}", fmt::join(names, " "));
}

std::string live(const Execution& x, size_t i) {
  std::vector<std::string> names;
  for (int id : x.live[i])
    if (!x.names[static_cast<size_t>(id)].empty()) names.push_back(x.names[static_cast<size_t>(id)]);
  return fmt::format("{}", fmt::join(names, " "));
}

std::string name(const program::UnitTrace& t, const std::vector<model::Span>& spans, const Sample& s) {
  const model::Op& op = t.list->ops[static_cast<size_t>(s.op)];
  return fmt::format("{}{} {}{}", program::name_of(s.pass),
                     s.span < 0 ? "" : fmt::format("({})", spans[static_cast<size_t>(s.span)].name), op.name,
                     s.step < 0 ? "" : "." + op.steps[static_cast<size_t>(s.step)].name);
}

} // namespace

std::string difference(const program::UnitTrace& t, const std::vector<model::Span>& spans, const Execution& x) {
  const program::Levels levels = program::levels(t);
  auto at = [&](size_t i) { return fmt::format("event {} ({})", i, name(t, spans, x.samples[i])); };
  program::Peak forward, backward, replay;
  for (size_t i = 0; i < x.samples.size(); ++i) {
    const Sample& s = x.samples[i];
    if (i >= t.events.size()) return fmt::format("{} is not traced", at(i));
    const program::Event& e = t.events[i];
    if (e.op != s.op || e.step != s.step || e.pass != s.pass || (e.pass == Pass::Replay && e.span != s.span))
      return fmt::format("{} is traced as {}", at(i), t.event_name(static_cast<int>(i), spans));
    if (levels.at_event[i] != s.level)
      return fmt::format("{}: level {} is traced as {}\n  live: {}\n  traced: {}", at(i), s.level, levels.at_event[i], live(x, i),
                         live(t, static_cast<int>(i)));
    // The gradient that starts the backward pass is allocated between the two passes.
    if (i > 0 && static_cast<int>(i) != t.forward_end && levels.after[i - 1] != s.before)
      return fmt::format("{}: level {} before it is traced as {}", at(i), s.before, levels.after[i - 1]);
    if (std::string modes = gradient_modes(t, e); !same_modes(modes, s.writes))
      return fmt::format("{}: gradients are written '{}', traced as '{}'", at(i), s.writes, modes);
    program::Peak& peak = s.pass == Pass::Forward ? forward : s.pass == Pass::Replay ? replay : backward;
    peak.raise(s.by, 0, static_cast<int>(i));
  }
  if (t.events.size() != x.samples.size())
    return fmt::format("{} events run, {} are traced, the next being {}", x.samples.size(), t.events.size(),
                       t.event_name(static_cast<int>(x.samples.size()), spans));
  // Without backward events a caller's hold outlives the last event.
  const bool ended = static_cast<int>(t.events.size()) > t.forward_end;
  if (ended && levels.after.back() != x.end_level)
    return fmt::format("level {} after everything is traced as {}", x.end_level, levels.after.back());
  if (levels.retained != x.retained) return fmt::format("retained {} is traced as {}", x.retained, levels.retained);
  const std::pair<const program::Peak*, const program::Peak*> peaks[] = {
      {&forward, &levels.forward}, {&replay, &levels.replay}, {&backward, &levels.backward}};
  for (auto [truth, engine] : peaks) {
    if (truth->event != engine->event || truth->bytes != engine->bytes)
      return fmt::format("peak {} at event {} is reported as {} at {}", truth->bytes, truth->event, engine->bytes, engine->event);
    if (truth->by != engine->by) {
      std::string text = fmt::format("peak at event {} by category:", truth->event);
      for (int c = 0; c < kCategoryCount; ++c)
        text += fmt::format(" {} {}/{}", name_of(static_cast<Category>(c)), truth->by[static_cast<Category>(c)], engine->by[static_cast<Category>(c)]);
      return text;
    }
  }
  return {};
}

std::string difference(const toy::Case& c, const model::Provider& provider, std::string* what) {
  std::optional<Execution> execution;
  std::optional<program::UnitTrace> trace;
  std::optional<ErrorCode> refused, wrong;
  std::string refused_text, wrong_text;
  try {
    execution = execute_alone(c.list, c.spans, provider, c.options);
  } catch (const Error& e) {
    refused = e.code();
    refused_text = e.what();
  }
  try {
    trace = program::trace(c.list, c.spans, provider, c.options);
  } catch (const Error& e) {
    wrong = e.code();
    wrong_text = e.what();
  }
  if (what) *what = refused ? refused_text : "ok";
  if (refused != wrong)
    return fmt::format("executing: {}; tracing: {}", refused ? refused_text : "ok", wrong ? wrong_text : "ok");
  return refused ? "" : difference(*trace, c.spans, *execution);
}

} // namespace gdn::brute
