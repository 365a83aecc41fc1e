#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "core/error.h"
#include "trainer/commands/commands.h"
#include "trainer/devices.h"
#include "trainer/options.h"
#include "trainer/sweep.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

namespace {

struct Options : CommonOptions {
  SweepOptions sweep;
};

void add_table(report::Document& d, const std::vector<SweepRow>& rows) {
  using report::Align;
  report::Table t{"sweep", {{"recompute", Align::Left, true}, {"peak", Align::Right}, {"predicted", Align::Right}, {"", Align::Left},
                            {"fastest", Align::Right}, {"median", Align::Right}, {"spread", Align::Right}, {"predicted", Align::Right}, {"bits"}}};
  for (const SweepRow& r : rows) {
    const bool equal = r.measured_peak == r.predicted_peak;
    t.rows.push_back({r.setting + (r.same_as.empty() ? "" : "  (= " + r.same_as + ")"), format_bytes(r.measured_peak), format_bytes(r.predicted_peak),
                      report::Cell(equal ? "=" : fmt::format("{:+d} B", r.measured_peak - r.predicted_peak), equal ? report::Tone::Plain : report::Tone::Bad),
                      format_seconds(r.measured_seconds), format_seconds(r.median_seconds), fmt::format("{:.0f} %", 100 * r.spread()),
                      format_seconds(r.predicted_seconds),
                      report::Cell(r.identical ? "same" : "differ", r.identical ? report::Tone::Plain : report::Tone::Bad)});
  }
  d.table(std::move(t));
}

void add_agreement(report::Document& d, const std::vector<SweepRow>& rows) {
  std::vector<double> bytes, held, predicted, measured;
  size_t ran = 0, exact = 0;
  for (const SweepRow& r : rows) {
    if (!r.same_as.empty()) continue;
    ++ran;
    exact += r.measured_peak == r.predicted_peak;
    bytes.push_back(static_cast<double>(r.predicted_peak));
    held.push_back(static_cast<double>(r.measured_peak));
    predicted.push_back(r.predicted_seconds);
    measured.push_back(r.measured_seconds);
  }
  d.heading("Agreement");
  d.pairs({{"settings", fmt::format("{}, of which {} with a program of their own", rows.size(), ran)},
           {"peak", fmt::format("{} of {} equal to the byte, {:.0f} % of pairs in the predicted order", exact, ran, 100 * rank_agreement(bytes, held))},
           {"time", fmt::format("{:.0f} % of pairs in the predicted order (replays at the forward time that their ops took)",
                                100 * rank_agreement(predicted, measured))}});
}

int sweep(const Options& o) {
  const Setup s = load_setup(o.config, o.settings);
  std::unique_ptr<Device> device = make_device(o.device);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run.seq, s.profile.run.settings.packed);
  if (device->name() == "cpu") say("running on the CPU: bytes are exact, times are those of reference arithmetic");
  Session session(s.profile.model, s.profile.run, *device, o.budget_bytes(*device), &o.laid_out_for(*device));
  const std::filesystem::path file = o.output_folder() / "sweep.yaml";
  Progress progress;
  Sweep sweep(session, s, *tokens, o.sweep);
  const std::vector<SweepRow> rows = sweep.run(
      file,
      [&](const SweepRow& r, size_t i, size_t n) {
        progress.show(fmt::format("{}/{} | {} | peak {} | {}{}", i, n, r.setting, format_bytes(r.measured_peak), format_seconds(r.measured_seconds),
                                  r.resumed ? " | from the file" : ""), i == n);
      },
      [] { return interrupted(); });
  progress.finish();
  report::Document d;
  d.heading(fmt::format("{} on {}: every recompute setting", s.profile.model.name, device->name()));
  add_table(d, rows);
  add_agreement(d, rows);
  if (std::any_of(rows.begin(), rows.end(), [](const SweepRow& r) { return r.resumed; }) && rows.front().measured_seconds > 0)
    d.line(fmt::format("Settings from the file were timed by an earlier sweep: '{}' took {} then, {} now.", rows.front().setting,
                       format_seconds(rows.front().measured_seconds), format_seconds(sweep.baseline_seconds())));
  d.line(fmt::format("Written: {}", file.string()));
  print(d);
  if (interrupted()) throw Error(ErrorCode::Interrupted, "interrupted; the same command goes on where it stopped");
  for (const SweepRow& r : rows)
    if (!r.identical) throw Error(ErrorCode::Numeric, fmt::format("'{}' changes loss or gradients", r.setting));
  return 0;
}

} // namespace

Runner add_sweep(CLI::App& program) {
  auto* command = program.add_subcommand("sweep", "every legal recompute setting: measured peak and time beside the prediction; resumable");
  auto options = std::make_shared<Options>();
  options->add_to(*command);
  command->add_option("--repeats", options->sweep.repeats, "timed runs of each setting, after one warm-up")->check(CLI::Range(1, 1000));
  command->add_flag("--hypothetical", options->sweep.hypothetical, "also forms that no revision has");
  return [options] { return sweep(*options); };
}

} // namespace gdn::trainer
