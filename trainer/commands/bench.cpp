#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>

#include <fmt/format.h>

#include "core/error.h"
#include "cost/cost.h"
#include "trainer/atomic_file.h"
#include "trainer/bench/body.h"
#include "trainer/bench/op_times.h"
#include "trainer/bench/rule.h"
#include "trainer/bench/versions.h"
#include "trainer/commands/commands.h"
#include "trainer/commands/measured_with.h"
#include "trainer/data.h"
#include "trainer/devices.h"
#include "trainer/options.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

namespace {

using report::Align;

struct BenchOptions : CommonOptions {
  int repeats = 0; // of what is timed
};

std::string rate(double value, double unit, const char* format) {
  return value > 0 ? fmt::format(fmt::runtime(format), value / unit) : "";
}

void warn_on_cpu(const Device& device, const char* what) {
  if (!device.asynchronous()) say(fmt::format("on the CPU these are the times of {}, and say nothing about a GPU", what));
}

void write(const std::filesystem::path& file, const config::Profile& profile, report::Document& d) {
  write_atomically(file, config::to_yaml(profile));
  d.line(fmt::format("Written: {}", file.string()));
}

// -------------------------------------------------------------------------------------------- rule ----

constexpr std::int64_t kCpuDivisor = 256; // of the sequence lengths on the CPU

int bench_rule(const BenchOptions& o) {
  const std::unique_ptr<Device> device = make_device(o.device);
  warn_on_cpu(*device, "reference arithmetic on short sequences");
  const int repeats = o.repeats > 0 ? o.repeats : device->asynchronous() ? 50 : 3;
  Progress progress;
  const bench::RuleProgress show = [&](const bench::RuleTime& t) {
    progress.show(fmt::format("{}/{} heads, {}: forward {}, backward {}", t.shape.key_heads, t.shape.value_heads, t.shape.name, format_seconds(t.forward),
                              format_seconds(t.backward)), false);
  };
  std::vector<bench::RuleTime> times;
  if (!device->asynchronous()) times = bench::time_rule_on_cpu(bench::shortened(bench::rule_cases(), kCpuDivisor), repeats, show);
#ifdef GDN_CUDA_DEVICE
  else times = bench::time_rule_on_cuda(bench::rule_cases(), repeats, show);
#endif
  progress.finish();

  config::Profile profile;
  profile.identity = {{"model", "gated delta rule, d = 128"}, {"provider", std::string(device->provider().name())}, {"device", device->name()},
                      {"kind", "measured"}, {"program", "gdntrain"}, {"command", command_line()}, {"versions", bench::versions(device->asynchronous())},
                      {"note", device->asynchronous() ? fmt::format("medians of {} CUDA-graph replays; gates, L2 norm and reductions over value heads included", repeats)
                                                      : fmt::format("medians of {} runs of the fp32 reference", repeats)}};
  report::Table t{"rule", {{"heads"}, {"sequences"}, {"M", Align::Right}, {"forward", Align::Right}, {"backward", Align::Right}, {"forward/M", Align::Right},
                           {"backward/M", Align::Right}, {"over floor", Align::Right}, {"over floor", Align::Right}}};
  for (const bench::RuleTime& r : times) {
    const double m = r.shape.millions();
    const std::string heads = fmt::format("{}/{}", r.shape.key_heads, r.shape.value_heads);
    auto over = [](Seconds seconds, Seconds floor) { return floor > 0 ? fmt::format("{:.2f} x", seconds / floor) : std::string(); };
    t.rows.push_back({heads, r.shape.name, fmt::format("{:.3g}", m), format_seconds(r.forward), format_seconds(r.backward), format_seconds(r.forward / m),
                      format_seconds(r.backward / m), over(r.forward, r.forward_floor), over(r.backward, r.backward_floor)});
    config::ProfileSet set{fmt::format("{} heads, {}", heads, r.shape.name), {}};
    auto row = [&](const char* key, double value, const char* unit, const char* source) { set.rows.push_back({key, value, unit, source}); };
    row("rule.token_heads", m * (1 << 20), "token-heads", "counted");
    row("rule.forward_seconds", r.forward, "seconds", "measured");
    row("rule.backward_seconds", r.backward, "seconds", "measured");
    row("rule.forward_seconds_per_m", r.forward / m, "seconds per 2^20 token-heads", "measured");
    row("rule.backward_seconds_per_m", r.backward / m, "seconds per 2^20 token-heads", "measured");
    if (r.forward_floor > 0) {
      row("rule.forward_floor_seconds", r.forward_floor, "seconds", "bytes of the kernels at 4.2 TB/s");
      row("rule.backward_floor_seconds", r.backward_floor, "seconds", "bytes of the kernels at 4.2 TB/s");
    }
    profile.sets.push_back(std::move(set));
    if (const std::string key = "lengths of " + r.shape.name; r.shape.name.find("documents") != std::string::npos &&
        std::none_of(profile.identity.begin(), profile.identity.end(), [&](const auto& entry) { return entry.first == key; }))
      profile.identity.push_back({key, fmt::format("{}", fmt::join(r.shape.lengths, " "))});
  }
  report::Document d;
  d.heading(fmt::format("Gated delta rule, d = 128, on {}", device->name()));
  d.table(std::move(t));
  d.line("M: 2^20 token-heads. Floor: the bytes that the kernels move, each tensor once a kernel, at the rate of a device copy.");
  const std::filesystem::path folder = o.folder.empty() ? std::filesystem::path("runs/bench") : std::filesystem::path(o.folder);
  std::filesystem::create_directories(folder);
  write(folder / "rule.yaml", profile, d);
  print(d);
  return 0;
}

// -------------------------------------------------------------------------------------------- body ----

int bench_body(const BenchOptions& o) {
  const Setup s = load_setup(o.config, o.settings);
  const std::unique_ptr<Device> device = make_device(o.device);
  warn_on_cpu(*device, "reference arithmetic");
  const int steps = o.repeats > 0 ? o.repeats : device->asynchronous() ? 20 : 3;
  const bench::BodyTimes times = bench::bench_body(s.profile.model, s.profile.run, s.setting, *device, o.budget_bytes(*device), steps);
  const Quantiles q = quantiles(times.seconds);
  const double tokens_per_second = static_cast<double>(times.tokens) / q.median;

  config::Profile profile = profile_identity(s, *device, device->provider(), command_line());
  profile.identity.push_back({"versions", bench::versions(device->asynchronous())});
  profile.identity.push_back({"note", fmt::format("body alone: {} layers, {} x {} tokens, forward and backward of the mean square of the last hidden state; median of {} steps",
                                                  s.profile.model.layers(), s.profile.run.micro_batch, s.profile.run.seq, steps)});
  config::ProfileSet set{s.setting.text(), {}};
  auto row = [&](const char* key, double value, const char* unit) { set.rows.push_back({key, value, unit, "measured"}); };
  row("body.tokens", static_cast<double>(times.tokens), "tokens");
  row("body.step_seconds", q.median, "seconds");
  row("body.step_seconds_p10", q.p10, "seconds");
  row("body.step_seconds_p90", q.p90, "seconds");
  row("body.tokens_per_second", tokens_per_second, "tokens/s");
  row("body.activation_bytes", static_cast<double>(times.activations), "bytes");
  row("body.arena_bytes", static_cast<double>(times.arena), "bytes");
  row("body.mean_square", times.loss, "");
  profile.sets.push_back(std::move(set));

  report::Document d;
  d.heading(fmt::format("{}, body, on {}", s.profile.model.name, device->name()));
  d.pairs({{"stack", s.profile.run.stack},
           {"recompute", s.setting.text()},
           {"layers", fmt::format("{}", s.profile.model.layers())},
           {"batch", fmt::format("{} x {} tokens, {}", s.profile.run.micro_batch, s.profile.run.seq, name_of(s.profile.run.dtype))},
           {"step", fmt::format("median {}, p10 {}, p90 {}", format_seconds(q.median), format_seconds(q.p10), format_seconds(q.p90))},
           {"throughput", fmt::format("{:.0f} tokens/s forward and backward", tokens_per_second)},
           {"activations", fmt::format("{} at the peak, scratch included, without weights and gradients", format_bytes(times.activations))}});
  write(o.output_folder() / "body.yaml", profile, d);
  print(d);
  return 0;
}

// --------------------------------------------------------------------------------------------- ops ----

int bench_ops(const BenchOptions& o) {
  const Setup s = load_setup(o.config, o.settings);
  const std::unique_ptr<Device> device = make_device(o.device);
  warn_on_cpu(*device, "reference arithmetic");
  const int steps = o.repeats > 0 ? o.repeats : device->asynchronous() ? 10 : 2;
  const std::vector<bench::OpTime> times = bench::time_ops(s, *device, o.budget_bytes(*device), steps);
  const config::Hardware hardware = config::Profiles().hardware(s.profile.hardware);
  const bool predicted = hardware.device_name == device->name();
  const cost::CostModel cost(hardware, std::string(device->provider().name()), s.profile.run.parallel, s.profile.run.dtype);

  config::Profile profile = profile_identity(s, *device, device->provider(), command_line());
  profile.identity.push_back({"versions", bench::versions(device->asynchronous())});
  profile.identity.push_back({"note", fmt::format("every op kind at every shape: medians over {} steps{}", steps, device->asynchronous() ? ", caches cold, launches covered" : "")});
  config::ProfileSet set{s.setting.text(), {}};
  report::Table t{"ops", {{"op", Align::Left, true}, {"pass"}, {"runs", Align::Right}, {"time", Align::Right}, {"predicted", Align::Right}, {"TFLOP/s", Align::Right},
                          {"GB/s", Align::Right}, {"shape", Align::Left, true}}};
  Seconds total = 0, expected = 0;
  for (const bench::OpTime& op : times) {
    const Seconds guess = predicted ? cost.seconds(op.work, op.pass) : 0;
    total += op.seconds * op.runs;
    expected += guess * op.runs;
    t.rows.push_back({op.op, op.pass, fmt::format("{}", op.runs), format_seconds(op.seconds), predicted ? format_seconds(guess) : "",
                      rate(op.work.flops / op.seconds, 1e12, "{:.3g}"), rate(static_cast<double>(op.work.traffic) / op.seconds, 1e9, "{:.3g}"), op.shape});
    const std::string key = fmt::format("ops.{}.{}", op.op, op.pass);
    auto row = [&](const char* what, double value, const char* unit, const std::string& source) { set.rows.push_back({fmt::format("{}.{}", key, what), value, unit, source}); };
    row("seconds", op.seconds, "seconds", "measured: " + op.shape);
    row("runs", op.runs, "runs", "counted");
    if (predicted) row("predicted_seconds", guess, "seconds", "predicted");
    if (op.work.flops > 0) row("flops_per_second", op.work.flops / op.seconds, "FLOP/s", "measured");
    if (op.work.traffic > 0) row("bytes_per_second", static_cast<double>(op.work.traffic) / op.seconds, "B/s", "measured");
  }
  profile.sets.push_back(std::move(set));
  report::Document d;
  d.heading(fmt::format("{} on {}: every op", s.profile.model.name, device->name()));
  d.table(std::move(t));
  d.pairs({{"sum of a step", predicted ? fmt::format("{}, predicted {}", format_seconds(total), format_seconds(expected)) : format_seconds(total)}});
  if (!predicted) d.line(fmt::format("No prediction: profile '{}' is of '{}'.", hardware.name, hardware.device_name));
  write(o.output_folder() / "ops.yaml", profile, d);
  print(d);
  return 0;
}

} // namespace

cli::Runner add_bench(cli::Command& program) {
  cli::Command command = program.subcommand("bench", "time the delta rule, the body of a model, or each of its ops");
  command.needs_subcommand(1, 1);
  struct What {
    cli::Command app;
    int (*run)(const BenchOptions&);
    std::shared_ptr<BenchOptions> options;
  };
  std::vector<What> all;
  auto add = [&](const char* name, const char* text, int (*run)(const BenchOptions&)) {
    all.push_back({command.subcommand(name, text), run, std::make_shared<BenchOptions>()});
    all.back().app.option("--repeats", all.back().options->repeats, "how often, for the median").between(1, 10000);
    return all.back();
  };
  What rule = add("rule", "the gated delta rule at the published shapes, beside the floor; on the CPU at short ones", bench_rule);
  rule.app.option("--device", rule.options->device, "cpu, cuda, or auto: cuda where there is one").one_of({"cpu", "cuda", "auto"});
  rule.app.option("-o,--output", rule.options->folder, "folder to write to; runs/bench if not given");
  What body = add("body", "forward and backward of the layers alone: tokens per second and activation bytes", bench_body);
  body.options->add_to(body.app);
  What ops = add("ops", "each op kind at each shape: time, rates, and what the planner expects", bench_ops);
  ops.options->add_to(ops.app);
  return [all] {
    for (const What& what : all)
      if (what.app.chosen()) return what.run(*what.options);
    return 2;
  };
}

} // namespace gdn::trainer
