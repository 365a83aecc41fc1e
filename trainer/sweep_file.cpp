#include "trainer/sweep_file.h"

#include <algorithm>

#include <fmt/core.h>

#include "config/yaml.h"
#include "core/error.h"
#include "reference/random.h"
#include "trainer/atomic_file.h"
#include "trainer/mapped_file.h"
#include "trainer/memory_report.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

namespace {

constexpr std::string_view kLastRow = "predicted.time.forward_backward_seconds";
constexpr int kDropped = 11; // a profile's number holds 53 of 64 bits exactly

std::string category_key(int c) { return fmt::format("categories.{}", name_of(static_cast<Category>(c))); }

} // namespace

config::ProfileSet to_set(const SweepRow& r) {
  config::ProfileSet set{r.setting, {}};
  add_memory_rows(set, r.at_peak, r.arena);
  auto add = [&](std::string key, double value, const char* unit, const char* source) { set.rows.push_back({std::move(key), value, unit, source}); };
  if (r.measured_process > 0) add("memory.process_bytes", static_cast<double>(r.measured_process), "bytes", "measured: in use on the device, context and libraries included");
  add("time.forward_backward_seconds", r.measured_seconds, "seconds", "measured: the fastest run");
  add("time.forward_backward_seconds_median", r.median_seconds, "seconds", "measured");
  add("time.forward_backward_seconds_slowest", r.slowest_seconds, "seconds", "measured");
  add("train.identical", r.identical ? 1.0 : 0.0, "1 or 0", "measured: loss and every gradient, bit by bit, against no recompute");
  add("train.results_high", static_cast<double>(r.results.high >> kDropped), "bits", "measured: hash of loss and gradients");
  add("train.results_low", static_cast<double>(r.results.low >> kDropped), "bits", "measured: hash of loss and gradients");
  add("predicted.memory.allocated_bytes", static_cast<double>(r.predicted_peak), "bytes", "predicted");
  if (r.predicted_process > 0) add("predicted.memory.process_bytes", static_cast<double>(r.predicted_process), "bytes", "predicted: state, arena, and the profile's rows outside");
  add(std::string(kLastRow), r.predicted_seconds, "seconds",
      r.planned ? "predicted: by the hardware profile" : "predicted: measured without recompute, plus replayed ops at their forward time");
  return set;
}

SweepRow from_set(const config::ProfileSet& set) {
  auto value = [&](std::string_view key) {
    const config::ProfileRow* row = set.find(key);
    return row ? row->value : 0;
  };
  auto bytes = [&](std::string_view key) { return static_cast<Bytes>(value(key)); };
  SweepRow r;
  r.setting = set.modules;
  r.measured_peak = bytes("memory.allocated_bytes");
  r.arena = bytes("memory.arena_bytes");
  r.measured_process = bytes("memory.process_bytes");
  for (int c = 0; c < kCategoryCount; ++c) r.at_peak.by[static_cast<size_t>(c)] = bytes(category_key(c));
  r.measured_seconds = value("time.forward_backward_seconds");
  r.median_seconds = value("time.forward_backward_seconds_median");
  r.slowest_seconds = value("time.forward_backward_seconds_slowest");
  r.results.high = static_cast<std::uint64_t>(value("train.results_high")) << kDropped;
  r.results.low = static_cast<std::uint64_t>(value("train.results_low")) << kDropped;
  r.identical = value("train.identical") == 1;
  r.predicted_peak = bytes("predicted.memory.allocated_bytes");
  r.predicted_process = bytes("predicted.memory.process_bytes");
  r.predicted_seconds = value(kLastRow);
  r.resumed = true;
  return r;
}

std::string sweep_fingerprint(const Setup& setup) {
  Setup plain = setup;
  plain.profile.run = plan::Setting{}.applied_to(plain.profile.run);
  plain.train.steps = 1;
  const std::string text = resolved_yaml(plain);
  return fmt::format("{:016x}", reference::stream_id(text.data(), text.size()));
}

config::Profile read_sweep(const std::filesystem::path& file, const std::string& hint) {
  try {
    config::Profile p = config::read_profile(file);
    if (p.sets.empty()) throw Error(ErrorCode::Config, "it has no sets");
    if (!MappedFile(file).content().ends_with('\n')) throw Error(ErrorCode::Config, "its last line is cut"); // one could not be appended
    for (const config::ProfileSet& set : p.sets)
      if (!set.find(kLastRow)) throw Error(ErrorCode::Config, fmt::format("'{}' is not complete", set.modules));
    return p;
  } catch (const Error& e) {
    throw Error(ErrorCode::Config, fmt::format("{}: no whole sweep can be read from it ({})", file.string(), e.what()), hint);
  }
}

config::Profile earlier_sweep(const std::filesystem::path& file, const Setup& setup) {
  if (!std::filesystem::exists(file)) return {};
  config::Profile before = read_sweep(file, "the file was cut short or edited: remove it, or choose another folder with -o");
  const auto mine = std::pair<std::string, std::string>("fingerprint", sweep_fingerprint(setup));
  if (std::find(before.identity.begin(), before.identity.end(), mine) == before.identity.end())
    throw Error(ErrorCode::Config, fmt::format("{}: this sweep belongs to another configuration", file.string()),
                "remove it, or choose another folder with -o");
  return before;
}

void append_to_sweep(const std::filesystem::path& file, config::Profile identity, const SweepRow& row, bool first) {
  identity.sets = {to_set(row)};
  const std::string text = config::to_yaml(identity);
  if (first) return write_atomically(file, text);
  const std::string head = "\nsets:\n";
  LineLog(file, true).write(text.substr(text.find(head) + head.size(), text.find_last_not_of('\n') + 1 - text.find(head) - head.size()));
}

} // namespace gdn::trainer
