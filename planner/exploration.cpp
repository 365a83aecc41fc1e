#include "planner/exploration.h"

#include <fmt/core.h>

#include "core/error.h"
#include "plan/explore.h"
#include "planner/progress.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

constexpr size_t kShownSpans = 12; // rows a table before --all

report::Table table(const char* name) {
  return {name, {{"span", report::Align::Left, true}, {"layers", report::Align::Left, true}, {"peak falls", report::Align::Right},
                 {"replay a step", report::Align::Right}, {"MiB for 1 ms", report::Align::Right}}};
}

void add(report::Table& t, const plan::ExploredSpan& s, const plan::Estimate& base) {
  const std::string value = s.replay > 1e-9 ? fmt::format("{:.1f}", s.value() / kMiB) : "no replay";
  t.rows.push_back({s.text(), s.kind, s.freed < 0 ? "-" + format_bytes(-s.freed) : format_bytes(s.freed),
                    fmt::format("{} ({})", format_seconds(s.replay), percent(s.replay / base.step_seconds)), value});
}

Json json(const std::vector<plan::ExploredSpan>& spans) {
  Json j = Json::array();
  for (const plan::ExploredSpan& s : spans)
    j.push_back({{"span", s.text()}, {"first", s.first}, {"last", s.last}, {"discard", s.discard}, {"module", s.module}, {"kind", s.kind},
                 {"peak_freed_bytes", s.freed}, {"retained_freed_bytes", s.retained}, {"replay_seconds", s.replay},
                 {"bytes_per_millisecond", s.value()}});
  return j;
}

} // namespace

int run_explore(const Case& c, bool all, const OutputOptions& output) {
  if (c.profile.run.recompute.granularity == config::Granularity::Full)
    throw Error(ErrorCode::Usage, "--explore: under full granularity every layer is one span already", "--granularity none");
  plan::ExploreOptions options;
  options.budget = c.budget;
  plan::Exploration x;
  {
    Progress progress;
    options.progress = [&](double share, const char* what) { progress(share, what); };
    x = plan::explore(c.profile.model, c.profile.run, c.hardware, options);
  }
  Output out;
  report::Document& d = out.text;
  add_run(d, c);
  d.heading(fmt::format("Every contiguous span of every layer kind, on top of {}", x.base.setting.text()));
  d.line(fmt::format("peak {} at {}", format_gib(x.base.peak_bytes), x.base.worst_rank().peak_event), report::Tone::Plain, 2);
  d.line(fmt::format("{} spans, whole block and discard output; {} lower the peak, {} cannot run", format_count(x.tried),
                     format_count(static_cast<std::int64_t>(x.spans.size())), format_count(x.impossible)), report::Tone::Plain, 2);
  d.heading("Most for its replay");
  report::Table best = table("spans");
  for (const plan::ExploredSpan& s : x.spans)
    if (all || best.rows.size() < kShownSpans) add(best, s, x.base);
  d.table(std::move(best));
  d.heading("The best for every price: each the cheapest next step");
  report::Table front = table("front");
  for (const plan::ExploredSpan& s : x.front) add(front, s, x.base);
  d.table(std::move(front));
  d.heading(c.profile.run.stack == "native" ? "Named spans of the stack" : "Today's modules in the same measure");
  report::Table modules = table("modules");
  for (const plan::ExploredSpan& s : x.modules) add(modules, s, x.base);
  d.table(std::move(modules));
  if (!x.spans.empty()) {
    const plan::ExploredSpan& s = x.spans.front();
    const std::string span = fmt::format("best={}..{}{}", s.first, s.last, s.discard ? ":discard" : "");
    d.line("to price one with other modules: --hypothetical --span " + span, report::Tone::Dim, 2);
    d.line(fmt::format("to train with it: spans: [\"{}\"] in the run file", span), report::Tone::Dim, 2);
  }
  add_assumptions(d, x.assumptions);
  out.csv = [&] {
    report::Document csv;
    report::Table t{"spans", {{"span"}, {"kind"}, {"module"}, {"peak_freed_bytes"}, {"retained_freed_bytes"}, {"replay_seconds"}}};
    for (const auto* list : {&x.spans, &x.modules})
      for (const plan::ExploredSpan& s : *list)
        t.rows.push_back({s.text(), s.kind, s.module, fmt::format("{}", s.freed), fmt::format("{}", s.retained), fmt::format("{}", s.replay)});
    csv.table(std::move(t));
    return csv;
  };
  out.json = [&] {
    Json j = json_head("gdnplan.explore/1", c, x.base.setting.text());
    j["peak_bytes"] = x.base.peak_bytes;
    j["peak_event"] = x.base.worst_rank().peak_event;
    j["tried"] = x.tried;
    j["impossible"] = x.impossible;
    j["spans"] = json(x.spans);
    j["front"] = json(x.front);
    j["today"] = json(x.modules);
    j["assumptions"] = json_assumptions(x.assumptions);
    j["notices"] = Json::array();
    return j;
  };
  write(out, output);
  return 0;
}

} // namespace gdn::planner
