#include <algorithm>
#include <memory>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/bench/versions.h"
#include "trainer/commands/commands.h"
#include "trainer/commands/measured_with.h"
#include "trainer/devices.h"
#include "trainer/options.h"
#include "trainer/sweep_file.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

namespace {

struct Options : CommonOptions {
  SweepOptions sweep;
  std::string measured;
};

void add_table(report::Document& d, const std::vector<SweepRow>& rows) {
  using report::Align;
  const bool process = std::any_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.measured_process > 0; });
  report::Table t{"sweep", {{"recompute", Align::Left, true}, {"peak", Align::Right}, {"predicted", Align::Right}, {"", Align::Left},
                            {"fastest", Align::Right}, {"median", Align::Right}, {"spread", Align::Right}, {"predicted", Align::Right}, {"bits"}}};
  if (process) t.columns.insert(t.columns.begin() + 4, {"process", Align::Right});
  for (const SweepRow& r : rows) {
    const bool equal = r.measured_peak == r.predicted_peak;
    t.rows.push_back({r.setting + (r.same_as.empty() ? "" : "  (= " + r.same_as + ")"), format_bytes(r.measured_peak), format_bytes(r.predicted_peak),
                      report::Cell(equal ? "=" : fmt::format("{:+d} B", r.measured_peak - r.predicted_peak), equal ? report::Tone::Plain : report::Tone::Bad),
                      format_seconds(r.measured_seconds), format_seconds(r.median_seconds), fmt::format("{:.0f} %", 100 * r.spread()),
                      format_seconds(r.predicted_seconds),
                      report::Cell(r.identical ? "same" : "differ", r.identical ? report::Tone::Plain : report::Tone::Bad)});
    if (process) t.rows.back().insert(t.rows.back().begin() + 4, format_bytes(r.measured_process));
  }
  d.table(std::move(t));
}

void add_agreement(report::Document& d, const std::vector<SweepRow>& rows) {
  const SweepAgreement a = agreement_of(rows);
  const bool planned = !rows.empty() && std::all_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.planned; });
  d.heading("Agreement");
  std::vector<std::pair<std::string, std::string>> pairs{
      {"settings", fmt::format("{}, of which {} with a program of their own", rows.size(), a.settings)},
      {"bits", fmt::format("{} of {} with the loss and every gradient of no recompute", a.identical, a.settings)},
      {"peak", fmt::format("{} of {} equal to the byte", a.exact_peaks, a.settings)}};
  if (a.processes > 0)
    pairs.push_back({"process", fmt::format("device memory of the whole process: {} of {} within 1 %; {:.2f} % off on average, {:+.2f} % at worst", a.processes_within,
                                            a.processes, 100 * a.process_mean, 100 * a.process_worst)});
  pairs.push_back({"time", fmt::format("{:.1f} % off on average, {:+.1f} % at worst, bias {:+.1f} % ({})", 100 * a.time_mean, 100 * a.time_worst, 100 * a.time_bias,
                                       planned ? "by the hardware profile" : "no recompute as measured, replays at the forward time that their ops took")});
  pairs.push_back({"order", fmt::format("{} of {} pairs of settings whose steps are more than {:.0f} % apart in the predicted order{}", a.ordered, a.pairs,
                                        100 * SweepAgreement::kApart,
                                        a.ordered < a.pairs ? fmt::format("; of the {} others, {} have timed runs that overlap", a.pairs - a.ordered, a.overlapping) : "")});
  d.pairs(std::move(pairs));
}

void print_rows(const std::string& heading, const std::vector<SweepRow>& rows, const std::vector<std::string>& lines) {
  report::Document d;
  d.heading(heading);
  add_table(d, rows);
  add_agreement(d, rows);
  for (const std::string& line : lines) d.line(line);
  print(d);
}

// What was measured some time, beside what is predicted now.
int predict_anew(const Options& o) {
  const config::Profile measured = read_sweep(o.measured, "--measured takes the file of a finished sweep");
  std::vector<config::Setting> settings = o.settings;
  for (const auto& [key, value] : measured.identity)
    if (key == "stack") settings.insert(settings.begin(), {"stack", value, o.measured});
  const Setup s = load_setup(o.config, settings);
  const std::vector<SweepRow> rows = predict_again(s, measured);
  std::vector<std::string> lines;
  if (std::none_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.measured_peak == r.predicted_peak; }))
    lines.push_back(fmt::format("No peak is equal: {} with these settings is not what was measured.", o.config));
  print_rows(fmt::format("{}: {} beside today's prediction", s.profile.model.name, o.measured), rows, lines);
  return 0;
}

int sweep(Options o) {
  const Setup s = load_setup(o.config, o.settings);
  std::unique_ptr<Device> device = make_device(o.device);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run);
  if (device->name() == "cpu") say("running on the CPU: bytes are exact, times are those of reference arithmetic");
  Session session(s.profile.model, s.profile.run, *device, o.budget_bytes(*device), &o.laid_out_for(*device));
  const std::filesystem::path file = o.output_folder() / "sweep.yaml";
  Progress progress;
  o.sweep.command = command_line();
  o.sweep.versions = bench::versions(device->asynchronous());
  Sweep sweep(session, s, *tokens, o.sweep);
  const std::vector<SweepRow> rows = sweep.run(
      file,
      [&](const SweepRow& r, size_t i, size_t n) {
        progress.show(fmt::format("{}/{} | {} | peak {} | {}{}", i, n, r.setting, format_bytes(r.measured_peak), format_seconds(r.median_seconds),
                                  r.resumed ? " | from the file" : ""), i == n);
      },
      [] { return interrupted(); });
  progress.finish();
  std::vector<std::string> lines;
  if (std::any_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.resumed; }) && rows.front().measured_seconds > 0)
    lines.push_back(fmt::format("Settings from the file were timed by an earlier sweep: '{}' took {} then, {} now.", rows.front().setting,
                                format_seconds(rows.front().measured_seconds), format_seconds(sweep.baseline_seconds())));
  for (const std::string& setting : sweep.too_large()) lines.push_back(fmt::format("Left out, too large for the device: {}", setting));
  lines.push_back(fmt::format("Written: {}", file.string()));
  print_rows(fmt::format("{} on {}: every recompute setting", s.profile.model.name, device->name()), rows, lines);
  if (interrupted()) throw Error(ErrorCode::Interrupted, "interrupted; the same command goes on where it stopped");
  for (const SweepRow& r : rows)
    if (!r.identical) throw Error(ErrorCode::Numeric, fmt::format("'{}' changes loss or gradients{}", r.setting, r.differs.empty() ? "" : ": " + r.differs));
  return 0;
}

} // namespace

cli::Runner add_sweep(cli::Command& program) {
  cli::Command command = program.subcommand("sweep", "every legal recompute setting: measured bytes, bits and time beside the prediction; resumable");
  auto options = std::make_shared<Options>();
  options->add_to(command);
  command.option("--repeats", options->sweep.repeats, "timed runs of each setting, after one that checks memory and, on a GPU, two to warm up").between(1, 1000);
  command.flag("--hypothetical", options->sweep.hypothetical, "also forms that no revision has");
  const cli::Option measured = command.option("--measured", options->measured, "the file of a finished sweep of CONFIG: its figures beside what is predicted now; nothing runs");
  return [options, measured] { return measured.given() ? predict_anew(*options) : sweep(*options); };
}

} // namespace gdn::trainer
