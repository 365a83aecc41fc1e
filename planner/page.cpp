#include "planner/page.h"

#include <algorithm>

#include <fmt/core.h>

#include "plan/timeline.h"
#include "planner/layouts.h"
#include "planner/results.h"
#include "report/figure.h"

namespace gdn::planner {

namespace {

double gib(Bytes b) { return static_cast<double>(b) / static_cast<double>(kGiB); }

std::string peak_text(const plan::Estimate& e) {
  return fmt::format("peak {}: {}", format_gib(e.peak_bytes, 1), e.worst_rank().peak_event);
}

} // namespace

std::string memory_figure(const Case& c, plan::Estimator& estimator, const plan::Estimate& e) {
  const plan::Timeline t = plan::timeline(estimator, e, c.profile.model, c.profile.run);
  report::AreaChart chart;
  chart.title = fmt::format("Memory of rank {} over the step, by category", t.rank);
  const bool long_step = t.end > 2;
  chart.x_unit = long_step ? "seconds of the rank's own work" : "milliseconds of the rank's own work";
  chart.x_end = t.end * (long_step ? 1 : 1e3);
  chart.y_unit = "GiB";
  for (int i = 0; i < kCategoryCount; ++i) {
    const Category k = static_cast<Category>(i);
    report::Band band{std::string(name_of(k)), std::string(name_of(k)), {}};
    bool any = false;
    for (const CategoryBytes& level : t.levels) {
      band.values.push_back(gib(level[k]));
      any = any || level[k] > 0;
    }
    if (any) chart.bands.push_back(std::move(band));
  }
  for (const plan::PassStretch& s : t.passes)
    chart.strip.push_back({s.from * (long_step ? 1 : 1e3), s.to * (long_step ? 1 : 1e3), std::string(program::name_of(s.pass))});
  chart.mark = t.peak;
  chart.mark_text = peak_text(e);
  // What allocated bytes may reach: the budget less what lies outside the tensors.
  const double room = gib(e.budget_bytes - (e.total_bytes - e.peak_bytes));
  if (room > 0 && room < 2.5 * gib(e.peak_bytes)) {
    chart.limit = room;
    chart.limit_text = fmt::format("{:.1f} GiB: the budget less context and allocator", room);
  }
  return report::area_chart(chart);
}

std::string settings_figure(const plan::Plan& plan, const plan::Setting& chosen) {
  report::DotChart chart;
  chart.title = "Memory and speed of every recompute setting";
  chart.x_label = "allocated peak, GiB";
  chart.y_label = "thousand tokens/s";
  for (const plan::Candidate& k : plan.candidates) {
    const plan::Estimate& e = k.estimate;
    report::Dot dot{gib(e.peak_bytes), e.tokens_per_second / 1e3, e.setting.text(), !e.fits ? "over" : k.dominated ? "dominated" : "front", !k.dominated && e.fits};
    if (e.setting.text() == chosen.text()) dot.kind = "chosen", dot.named = true;
    chart.dots.push_back(std::move(dot));
  }
  // The chosen one is named first, then the fastest of the front.
  std::stable_sort(chart.dots.begin(), chart.dots.end(), [](const report::Dot& a, const report::Dot& b) { return (a.kind == "chosen") > (b.kind == "chosen"); });
  const plan::Estimate& e = plan.candidates.front().estimate;
  const double room = gib(e.budget_bytes - (e.total_bytes - e.peak_bytes));
  double most = 0, least = 1e300;
  for (const report::Dot& d : chart.dots) most = std::max(most, d.x), least = std::min(least, d.x);
  if (room > least && room < most + 0.5 * (most - least)) {
    chart.x_limit = room;
    chart.limit_text = "fits left of this";
  }
  return report::dot_chart(chart);
}

std::string front_figure(const plan::Search& search) {
  report::DotChart chart;
  chart.title = "The fastest layout for its memory";
  chart.x_label = "allocated peak, GiB";
  chart.y_label = "thousand tokens/s";
  for (const plan::SearchPoint& p : search.front) {
    const plan::Estimate& e = p.estimate;
    chart.dots.push_back({gib(e.peak_bytes), e.tokens_per_second / 1e3, fmt::format("{}; {}", layout_text(p.run), e.setting.text()),
                          chart.dots.empty() ? "chosen" : "front", true});
  }
  return report::dot_chart(chart);
}

namespace {

std::vector<report::Card> cards(const plan::Estimate& e) {
  const report::Tone tone = !e.fits ? report::Tone::Bad : e.tight ? report::Tone::Warn : report::Tone::Good;
  return {{format_gib(e.peak_bytes, 1), "allocated peak"},
          {e.fits ? format_gib(e.margin(), 1) + " left" : format_gib(-e.margin(), 1) + " over",
           fmt::format("of {} with context and allocator", format_gib(e.budget_bytes, 1)), tone},
          {format_count(static_cast<std::int64_t>(e.tokens_per_second)), "tokens/s"},
          {fmt::format("{:.1f} %", e.mfu * 100), "model FLOPs utilisation"},
          {format_seconds(e.step_seconds), fmt::format("a step, {:.1f} % of it recompute", 100 * e.recompute_seconds / e.step_seconds)}};
}

std::string subtitle(const Case& c, const config::Run& run, const plan::Setting& setting) {
  return fmt::format("{} x {}: {}, sequences of {} tokens, {} a step; recompute {}", run.parallel.gpus, c.hardware.name, layout_text(run),
                     format_count(run.seq), run.global_batch, setting.text());
}

} // namespace

report::Page make_page(const Case& c, const plan::Search& search, const report::Document& details) {
  const plan::SearchPoint& best = search.front.front();
  report::Page page{c.profile.model.name, subtitle(c, best.run, best.estimate.setting), cards(best.estimate), {}};
  page.body.heading(fmt::format("The fastest layouts for their memory, of {} candidates", format_count(search.counts.candidates)));
  page.body.figure(front_figure(search), "Nothing legal is both faster and smaller than a point of the line; the ringed one is shown here.");
  for (const report::Block& b : details.blocks) page.body.blocks.push_back(b);
  return page;
}

report::Page make_page(const Case& c, plan::Estimator& estimator, const plan::Estimate& e, const plan::Plan& plan,
                       const report::Document& details) {
  report::Page page{c.profile.model.name, subtitle(c, c.profile.run, e.setting), cards(e), {}};
  page.body.heading("Memory over the step");
  page.body.figure(memory_figure(c, estimator, e),
                   fmt::format("Live bytes of rank {}, the fullest, in the order it runs; the strip below shows forward (light), backward (dark) and "
                               "replay (red). Steady micro-batches are drawn as often as the peak needs.", e.worst));
  page.body.heading("What recompute buys");
  page.body.figure(settings_figure(plan, e.setting),
                   "Every legal recompute setting: the line joins those that nothing beats in both memory and speed; the ringed one is shown here.");
  for (const report::Block& b : details.blocks) page.body.blocks.push_back(b);
  return page;
}

} // namespace gdn::planner
