#include <algorithm>
#include <cmath>
#include <csignal>
#include <memory>
#include <optional>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/atomic_file.h"
#include "trainer/checkpoint/run_checkpoints.h"
#include "trainer/comm/launch.h"
#include "trainer/commands/commands.h"
#include "trainer/data.h"
#include "trainer/devices.h"
#include "trainer/exchange_report.h"
#include "trainer/hf/weights.h"
#include "trainer/memory_report.h"
#include "trainer/options.h"
#include "trainer/prediction.h"
#include "trainer/step_profile.h"
#include "trainer/time_prediction.h"
#include "trainer/training.h"

namespace gdn::trainer {

namespace {

struct RunOptions : CommonOptions {
  std::string hf, export_hf;
  bool dry_run = false;
  checkpoint::CheckpointOptions checkpoints;
  std::vector<cli::Option> writing; // any of these was given: checkpoints are written

  void add_checkpoints_to(cli::Command& command);
};

void add_heading(report::Document& d, const Setup& s, const Device& device, const std::string& data) {
  const config::Run& r = s.profile.run;
  d.heading(fmt::format("{} on {}", s.profile.model.name, device.name()));
  d.pairs({{"stack", r.stack == "megatron" ? fmt::format("megatron, {}, {}", config::name_of(r.build), r.revision.text()) : r.stack},
           {"recompute", s.setting.text()},
           {"batch", fmt::format("{} micro-batches of {} x {} tokens, {}", r.micro_batches(), r.micro_batch, r.seq, name_of(r.dtype))},
           {"data", data}});
}

// The plan of the step alone, on the pipeline rank that needs most: 0 when it fits, 3 when it does not.
int dry_run(const RunOptions& o, const Setup& s, Device& device, const std::string& data) {
  plan::Workload workload(s.profile.model, s.profile.run, o.laid_out_for(device));
  const std::int64_t stages = s.profile.run.parallel.pp;
  Prediction most;
  std::int64_t fullest = 0;
  for (std::int64_t stage = 0; stage < stages; ++stage) {
    const Prediction p = predict(workload, s.setting, step_program(workload, s.setting, static_cast<int>(s.profile.run.micro_batches()), stage), stage);
    if (p.total_bytes() <= most.total_bytes()) continue;
    most = p;
    fullest = stage;
  }
  const Bytes budget = o.budget_bytes(device);
  report::Document d;
  add_heading(d, s, device, data);
  if (stages > 1) d.line(fmt::format("Pipeline rank {} of {} needs most:", fullest, stages));
  add_prediction(d, most, budget);
  if (device.asynchronous() && s.profile.run.parallel.gpus > 1 && most.total_bytes() <= budget)
    d.line(fmt::format("{} are left for the connections between ranks, which are not counted: NCCL's buffers, 64 MiB a group for sums, copies of what "
                       "pipeline stages send. A run connects first and plans with what is free then.", format_bytes(budget - most.total_bytes())));
  print(d);
  if (most.total_bytes() <= budget) return 0;
  throw Error(ErrorCode::DoesNotFit, does_not_fit(workload, s.setting, most, budget, fullest));
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

// What the planner expects of the device beside what the steps took: the median of those that timed no op.
void add_time_comparison(report::Document& d, const Setup& s, const Device& device, const std::vector<StepRecord>& steps) {
  const std::optional<PredictedTime> predicted = TimePrediction(s, device).of(s.setting);
  if (!predicted || steps.size() < 3) return;
  std::vector<double> whole, passes;
  for (size_t i = 1; i + 1 < steps.size(); ++i) {
    whole.push_back(steps[i].seconds);
    passes.push_back(steps[i].result.seconds);
  }
  d.heading("Time, predicted against measured");
  using report::Align;
  report::Table t{"time", {{"of a step"}, {"predicted", Align::Right}, {"measured", Align::Right}, {"difference", Align::Right}}};
  auto row = [&](const char* what, Seconds expected, const std::vector<double>& taken) {
    const double measured = quantiles(taken).median;
    t.rows.push_back({what, format_seconds(expected), format_seconds(measured), fmt::format("{:+.1f} %", 100 * (expected / measured - 1))});
  };
  row("forward and backward", predicted->forward_backward, passes);
  row("all, with the update", predicted->step, whole);
  d.table(std::move(t));
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

// Under a launcher the number of ranks is a fact: `gpus`, unless --set says otherwise (and is then checked).
std::vector<config::Setting> settings_of(const RunOptions& o, const World& world) {
  std::vector<config::Setting> settings = o.settings;
  const bool given = std::any_of(settings.begin(), settings.end(), [](const config::Setting& s) { return s.key == "gpus"; });
  if (world.size() > 1 && !given) settings.push_back({"gpus", std::to_string(world.size()), "the launcher"});
  if (world.size() > 1 && (!o.hf.empty() || !o.export_hf.empty()))
    throw Error(ErrorCode::Usage, fmt::format("--hf and --export-hf work on one rank, but {} were started", world.size()));
  return settings;
}

int run(const RunOptions& o) {
  std::signal(SIGXFSZ, SIG_IGN); // a file size limit is an error of the write, with a message
  interrupted();                 // from here on a signal is an answer between steps
  World& world = this_world();
  const bool first = world.rank() == 0;
  const Setup s = load_setup(o.config, settings_of(o, world));
  std::unique_ptr<Device> device = make_device(o.device);
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run);
  if (device->name() == "cpu")
    say(fmt::format("running on the CPU{}: the same program as on a GPU, with reference arithmetic",
                    o.device == "auto" ? " (no CUDA device)" : ""));
  if (s.train.warmup_steps > s.train.steps)
    say(fmt::format("train.warmup_steps = {} of {} steps: the learning rate never reaches train.lr", s.train.warmup_steps, s.train.steps));
  if (o.dry_run) return dry_run(o, s, *device, tokens->describe());

  const std::unique_ptr<World> devices = device->connect(world);
  World& exchanging = devices ? *devices : world;
  const Ranks ranks(exchanging, s.profile.run.parallel);
  hf::RunWeights weights(s.profile.model, o.hf, o.export_hf);
  Session session(s.profile.model, s.profile.run, *device, o.budget_bytes(*device), &o.laid_out_for(*device), &ranks);
  session.use(s.setting);
  const Prediction predicted = predict(session.workload(), s.setting, session.program(), ranks.place().pp);
  const std::filesystem::path folder = o.output_folder();
  checkpoint::RunCheckpoints checkpoints(o.checkpoints, s, tokens->describe(), folder, say);
  const std::int64_t resumed = checkpoints.open(ranks);
  if (resumed >= s.train.steps && !checkpoints.owes(resumed) && o.export_hf.empty()) {
    say(fmt::format("all {} steps are done: nothing to do (more with --steps)", s.train.steps));
    return 0;
  }
  if (first) write_atomically(folder / "config.yaml", resolved_yaml(s));
  if (first && resumed > 0) checkpoint::cut_log(folder / "log.jsonl", resumed);
  std::optional<LineLog> log;
  if (first) log.emplace(folder / "log.jsonl", resumed > 0);
  Progress progress;
  Training training(session, s.train, *tokens);
  weights.load_into(session.parameters());
  checkpoints.restore(session);
  training.resume(resumed);
  if (!weights.note().empty()) say(weights.note());
  std::vector<StepRecord> steps;
  Ledger::Peak peak;
  StepProfile timings(session);
  std::vector<TimedExchange> exchanges; // of the last step that was timed
  auto stopped = [&] { // asked of any rank
    double asked = interrupted();
    ranks.world().sum_on_host({&asked, 1});
    return asked > 0;
  };
  while (!training.finished() && !stopped()) {
    // Timing op by op makes an asynchronous device wait after each: there the last step alone is.
    const bool timed = !device->asynchronous() || training.done() + 1 == s.train.steps;
    if (timed) exchanging.time_exchanges();
    steps.push_back(training.step(timed ? timings.observer() : Observer{}));
    if (timed) exchanges = exchanging.timed_exchanges();
    timings.step_done(!timed || (steps.back().warm_up && s.train.steps > 1));
    steps.back().device_peak = device->peak();
    const StepRecord& r = steps.back();
    if (r.result.peak.bytes > peak.bytes) peak = r.result.peak;
    if (log) log->write(step_json(r));
    if (first) progress.show(step_line(r), training.finished());
    checkpoints.after_step(session, training.done());
  }
  if (first) progress.finish();
  checkpoints.finish(session, training.done());
  if (steps.empty() && !training.finished()) throw Error(ErrorCode::Interrupted, "interrupted before the first step was done");

  weights.store_from(session.parameters(), s.profile.run.dtype);
  if (steps.empty()) {
    say(fmt::format("all {} steps were done: only written anew, {}", s.train.steps,
                    o.export_hf.empty() ? checkpoint::step_folder(checkpoints.folder(), resumed).string() : o.export_hf));
    return 0;
  }
  config::Profile profile = profile_identity(s, *device, session.workload().provider(), "run");
  profile.sets.push_back(measured_set(s, steps, peak, session.arena_bytes()));
  timings.add_rows(profile.sets.back());
  add_exchange_rows(profile.sets.back(), exchanges);
  if (first) write_atomically(folder / "profile.yaml", config::to_yaml(profile));
  report::Document d;
  add_heading(d, s, *device, tokens->describe());
  add_outcome(d, steps, s.profile.model.vocab);
  add_comparison(d, predicted, peak, session.arena_bytes());
  add_time_comparison(d, s, *device, steps);
  add_exchanges(d, s, *device, exchanges);
  d.line(fmt::format("Written: {0}/log.jsonl, {0}/config.yaml, {0}/profile.yaml", folder.string()));
  print(d);
  if (stopped())
    throw Error(ErrorCode::Interrupted, fmt::format("interrupted after step {}", training.done()),
                checkpoints.last_step() > 0 ? fmt::format("--resume goes on after step {}", checkpoints.last_step()) : "");
  return 0;
}

void RunOptions::add_checkpoints_to(cli::Command& command) {
  writing.push_back(command.option("--checkpoint", checkpoints.folder,
                                   "folder of the checkpoints (OUTPUT/checkpoints if not given); writes one at the end and when interrupted"));
  writing.push_back(command.option("--checkpoint-every", checkpoints.every, "and one every so many steps").between(1, INT64_MAX));
  writing.push_back(command.option("--keep", checkpoints.keep, "keep the newest so many; all if not given").between(1, INT64_MAX));
  command.option("--resume", checkpoints.resume, "go on from the newest whole checkpoint, or from a step or a path; to the same bits")
      .or_alone("latest");
}

} // namespace

cli::Runner add_run(cli::Command& program) {
  cli::Command command = program.subcommand("run", "train: step lines, a log, a measured profile beside the prediction");
  auto options = std::make_shared<RunOptions>();
  options->add_to(command);
  command.option("--hf", options->hf, "start from the weights of a Hugging Face checkpoint: a folder with config.json and safetensors");
  command.option("--export-hf", options->export_hf, "leave the weights as a Hugging Face checkpoint in this new folder");
  options->add_checkpoints_to(command);
  command.flag("--dry-run", options->dry_run, "only print what the step needs; ends 0 when it fits, 3 when it does not");
  return [options] {
    options->checkpoints.write = std::any_of(options->writing.begin(), options->writing.end(), [](const cli::Option& o) { return o.given(); });
    return run(*options);
  };
}

} // namespace gdn::trainer
