#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "core/error.h"
#include "trainer/atomic_file.h"
#include "trainer/commands/commands.h"
#include "trainer/data.h"
#include "trainer/devices.h"
#include "trainer/hf/weights.h"
#include "trainer/memory_report.h"
#include "trainer/options.h"
#include "trainer/prediction.h"
#include "trainer/step_profile.h"
#include "trainer/training.h"

namespace gdn::trainer {

namespace {

struct RunOptions : CommonOptions {
  std::string hf, export_hf;
  bool dry_run = false;
};

void add_heading(report::Document& d, const Setup& s, const Device& device, const std::string& data) {
  const config::Run& r = s.profile.run;
  d.heading(fmt::format("{} on {}", s.profile.model.name, device.name()));
  d.pairs({{"stack", r.stack == "megatron" ? fmt::format("megatron, {}, {}", config::name_of(r.build), r.revision.text()) : r.stack},
           {"recompute", s.setting.text()},
           {"batch", fmt::format("{} micro-batches of {} x {} tokens, {}", r.micro_batches(), r.micro_batch, r.seq, name_of(r.dtype))},
           {"data", data}});
}

// The plan of the step alone: 0 when it fits, 3 when it does not.
int dry_run(const RunOptions& o, const Setup& s, Device& device, const std::string& data) {
  plan::Workload workload(s.profile.model, s.profile.run, o.laid_out_for(device));
  const program::Program program = step_program(workload, s.setting, static_cast<int>(s.profile.run.micro_batches()));
  const Prediction p = predict(workload, s.setting, program);
  const Bytes budget = o.budget_bytes(device);
  report::Document d;
  add_heading(d, s, device, data);
  add_prediction(d, p, budget);
  print(d);
  if (p.total_bytes() <= budget) return 0;
  throw Error(ErrorCode::DoesNotFit, does_not_fit(workload, s.setting, p, budget));
}

config::ProfileSet measured_set(const Setup& s, const std::vector<StepRecord>& steps, const Ledger::Peak& peak, Bytes arena) {
  config::ProfileSet set{s.setting.text(), {}};
  auto row = [&](std::string key, double value, const char* unit) { set.rows.push_back({std::move(key), value, unit, "measured"}); };
  add_memory_rows(set, peak.by, arena);
  std::vector<double> seconds;
  for (const StepRecord& r : steps)
    if (!r.warm_up || steps.size() == 1) seconds.push_back(r.seconds);
  const Quantiles q = quantiles(seconds);
  row("time.step_seconds", q.median, "seconds");
  row("time.step_seconds_p10", q.p10, "seconds");
  row("time.step_seconds_p90", q.p90, "seconds");
  row("throughput.tokens_per_second", static_cast<double>(steps.back().result.tokens) / q.median, "tokens/s");
  row("train.steps", static_cast<double>(steps.size()), "steps");
  row("train.loss", steps.back().result.loss, "nats");
  return set;
}

void add_outcome(report::Document& d, const std::vector<StepRecord>& steps, std::int64_t vocab) {
  std::vector<double> seconds;
  for (const StepRecord& r : steps)
    if (!r.warm_up || steps.size() == 1) seconds.push_back(r.seconds);
  const Quantiles q = quantiles(seconds);
  d.heading("Outcome");
  d.pairs({{"loss", fmt::format("{:.4f} after {} steps, {:.4f} at the first (uniform guessing: {:.4f})", steps.back().result.loss, steps.size(),
                                steps.front().result.loss, std::log(static_cast<double>(vocab)))},
           {"step time", fmt::format("median {}, p10 {}, p90 {}{}", format_seconds(q.median), format_seconds(q.p10), format_seconds(q.p90),
                                     steps.size() > 1 ? " (without the first)" : "")},
           {"throughput", fmt::format("{:.0f} tokens/s", static_cast<double>(steps.back().result.tokens) / q.median)}});
}

int run(const RunOptions& o) {
  const Setup s = load_setup(o.config, o.settings);
  std::unique_ptr<Device> device = make_device(o.device);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run.seq, s.profile.run.settings.packed);
  if (device->name() == "cpu")
    say(fmt::format("running on the CPU{}: the same program as on a GPU, with reference arithmetic",
                    o.device == "auto" ? " (no CUDA device)" : ""));
  if (s.train.warmup_steps > s.train.steps)
    say(fmt::format("train.warmup_steps = {} of {} steps: the learning rate never reaches train.lr", s.train.warmup_steps, s.train.steps));
  if (o.dry_run) return dry_run(o, s, *device, tokens->describe());

  hf::RunWeights weights(s.profile.model, o.hf, o.export_hf);
  Session session(s.profile.model, s.profile.run, *device, o.budget_bytes(*device), &o.laid_out_for(*device));
  session.use(s.setting);
  const Prediction predicted = predict(session.workload(), s.setting, session.program());
  const std::filesystem::path folder = o.output_folder();
  write_atomically(folder / "config.yaml", resolved_yaml(s));
  LineLog log(folder / "log.jsonl", false);
  Progress progress;
  Training training(session, s.train, *tokens);
  weights.load_into(session.parameters());
  if (!weights.note().empty()) say(weights.note());
  std::vector<StepRecord> steps;
  Ledger::Peak peak;
  StepProfile timings(session);
  while (!training.finished() && !interrupted()) {
    // Timing op by op makes an asynchronous device wait after each: there the last step alone is.
    const bool timed = !device->asynchronous() || training.done() + 1 == s.train.steps;
    steps.push_back(training.step(timed ? timings.observer() : Observer{}));
    timings.step_done(!timed || (steps.back().warm_up && s.train.steps > 1));
    steps.back().device_peak = device->peak();
    const StepRecord& r = steps.back();
    if (r.result.peak.bytes > peak.bytes) peak = r.result.peak;
    log.write(step_json(r));
    progress.show(step_line(r), training.finished());
  }
  progress.finish();
  if (steps.empty()) throw Error(ErrorCode::Interrupted, "interrupted before the first step was done");

  weights.store_from(session.parameters(), s.profile.run.dtype);
  config::Profile profile = profile_identity(s, *device, session.workload().provider(), "run");
  profile.sets.push_back(measured_set(s, steps, peak, session.arena_bytes()));
  timings.add_rows(profile.sets.back());
  write_atomically(folder / "profile.yaml", config::to_yaml(profile));
  report::Document d;
  add_heading(d, s, *device, tokens->describe());
  add_outcome(d, steps, s.profile.model.vocab);
  add_comparison(d, predicted, peak, session.arena_bytes());
  d.line(fmt::format("Written: {0}/log.jsonl, {0}/config.yaml, {0}/profile.yaml", folder.string()));
  print(d);
  if (interrupted()) throw Error(ErrorCode::Interrupted, fmt::format("interrupted after step {}", training.done()));
  return 0;
}

} // namespace

Runner add_run(CLI::App& program) {
  auto* command = program.add_subcommand("run", "train: step lines, a log, a measured profile beside the prediction");
  auto options = std::make_shared<RunOptions>();
  options->add_to(*command);
  command->add_option("--hf", options->hf, "start from the weights of a Hugging Face checkpoint: a folder with config.json and safetensors");
  command->add_option("--export-hf", options->export_hf, "leave the weights as a Hugging Face checkpoint in this new folder");
  command->add_flag("--dry-run", options->dry_run, "only print what the step needs; ends 0 when it fits, 3 when it does not");
  return [options] { return run(*options); };
}

} // namespace gdn::trainer
