#include "trainer/memory_report.h"

#include <fmt/core.h>

namespace gdn::trainer {

namespace {

using report::Align;
using report::Cell;
using report::Tone;

std::string signed_bytes(Bytes difference) { return difference == 0 ? "0" : fmt::format("{:+d} B", difference); }

bool in_ledger(Category c) { return c != Category::Context && c != Category::Allocator; }

} // namespace

void add_prediction(report::Document& d, const Prediction& p, Bytes budget) {
  d.heading("Memory of a step");
  report::Table t{"memory", {{"category"}, {"at the peak", Align::Right}}};
  for (int i = 0; i < kCategoryCount; ++i)
    if (const auto c = static_cast<Category>(i); in_ledger(c)) t.rows.push_back({std::string(name_of(c)), format_bytes(p.at_peak[c])});
  t.rows.push_back({Cell("live", Tone::Strong), Cell(format_bytes(p.peak_bytes), Tone::Strong)});
  d.table(std::move(t));
  const bool fits = p.total_bytes() <= budget;
  d.pairs({{"peak", p.peak_event},
           {"to allocate", fmt::format("{}: {} of parameters, gradients and optimizer, {} laid out for the rest", format_bytes(p.total_bytes()),
                                       format_bytes(p.state.total()), format_bytes(p.arena_bytes))},
           {"may be used", format_bytes(budget)}});
  d.line(fits ? "Fits." : "Does not fit.", fits ? Tone::Good : Tone::Bad);
}

void add_comparison(report::Document& d, const Prediction& p, const Ledger::Peak& measured, Bytes arena) {
  d.heading("Memory, predicted against measured");
  report::Table t{"memory", {{"category"}, {"predicted", Align::Right}, {"measured", Align::Right}, {"difference", Align::Right}}};
  auto row = [&](const std::string& name, Bytes predicted, Bytes held) {
    const Tone tone = predicted == held ? Tone::Plain : Tone::Bad;
    t.rows.push_back({name, format_bytes(predicted), format_bytes(held), Cell(signed_bytes(held - predicted), tone)});
  };
  for (int i = 0; i < kCategoryCount; ++i)
    if (const auto c = static_cast<Category>(i); in_ledger(c)) row(std::string(name_of(c)), p.at_peak[c], measured.by[c]);
  row("live, at the peak", p.peak_bytes, measured.bytes);
  row("allocated", p.total_bytes(), p.state.total() + arena);
  d.table(std::move(t));
  d.pairs({{"peak", measured.event}});
}

void add_memory_rows(config::ProfileSet& set, const CategoryBytes& at_peak, Bytes arena) {
  auto row = [&](std::string key, Bytes value) { set.rows.push_back({std::move(key), static_cast<double>(value), "bytes", "measured"}); };
  row("memory.allocated_bytes", at_peak.total());
  row("memory.arena_bytes", arena);
  for (int i = 0; i < kCategoryCount; ++i)
    if (const auto c = static_cast<Category>(i); in_ledger(c)) row(fmt::format("categories.{}", name_of(c)), at_peak[c]);
}

} // namespace gdn::trainer
