#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "config/hardware_io.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"
#include "cost/cost.h"
#include "trainer/atomic_file.h"
#include "trainer/bench/efficiencies.h"
#include "trainer/bench/op_times.h"
#include "trainer/bench/versions.h"
#include "trainer/commands/commands.h"
#include "trainer/commands/measured_with.h"
#include "trainer/devices.h"
#include "trainer/options.h"

namespace gdn::trainer {

namespace {

struct CalibrateOptions : CommonOptions {
  std::vector<std::string> also;
  std::string hardware, file;
  int repeats = 0;
};

bool is_file(const std::string& what) { return what.ends_with(".yaml") || what.ends_with(".yml") || what.find('/') != std::string::npos; }

// Time of a step's ops by the measurements and by the cost model.
struct Total {
  Seconds measured = 0, before = 0, after = 0;
};

int calibrate(const CalibrateOptions& o) {
  const std::unique_ptr<Device> device = make_device(o.device);
  if (!device->asynchronous()) say("on the CPU: efficiencies of reference arithmetic, of use for trying the command out");
  const int steps = o.repeats > 0 ? o.repeats : device->asynchronous() ? 10 : 2;
  const std::string provider{device->provider().name()};
  std::vector<std::string> configs{o.config};
  configs.insert(configs.end(), o.also.begin(), o.also.end());

  std::vector<bench::Sample> samples;
  std::string wanted = o.hardware, models;
  DType dtype = DType::BF16;
  config::Parallel parallel;
  for (const std::string& config : configs) {
    const Setup s = load_setup(config, o.settings);
    if (wanted.empty()) wanted = s.profile.hardware;
    dtype = s.profile.run.dtype;
    parallel = s.profile.run.parallel;
    for (const bench::OpTime& op : bench::time_ops(s, *device, o.budget_bytes(*device), steps))
      if (!op.communicates) samples.push_back({op.work, op.pass, op.seconds, op.runs});
    models += (models.empty() ? "" : ", ") + s.profile.model.name;
  }

  const config::Hardware before = config::Profiles().hardware(wanted);
  if (before.device_name != device->name())
    say(fmt::format("profile '{}' is of '{}', measured on '{}'", before.name, before.device_name, device->name()));
  const std::string source = fmt::format("measured on one {}: gdntrain calibrate, {}; {}", device->name(), models, bench::versions(device->asynchronous()));
  const std::vector<config::EfficiencyRow> rows = bench::fit_efficiencies(samples, before, provider, dtype, source);
  config::Hardware after = before;
  bench::replace_efficiencies(after, rows);
  const std::string text = is_file(wanted) ? bench::with_efficiencies(config::read_text_file(wanted), wanted, rows) : config::to_yaml(config::to_node(after));
  const std::string file = !o.file.empty() ? o.file : is_file(wanted) ? wanted : before.name + ".yaml";
  config::read_hardware(config::parse_yaml(text, file)); // what is written can be read
  write_atomically(file, text);

  const cost::CostModel was(before, provider, parallel, dtype), is(after, provider, parallel, dtype);
  std::map<std::pair<std::string, std::string>, Total> totals;
  Total all;
  for (const bench::Sample& s : samples) {
    if (s.work.family == model::Family::None) continue;
    for (Total* t : {&totals[{std::string(model::name_of(s.work.family)), s.pass}], &all}) {
      t->measured += s.seconds * s.runs;
      t->before += was.seconds(s.work, s.pass) * s.runs;
      t->after += is.seconds(s.work, s.pass) * s.runs;
    }
  }
  using report::Align;
  report::Document d;
  d.heading(fmt::format("Efficiencies of provider '{}' on {}", provider, device->name()));
  report::Table t{"efficiencies", {{"family"}, {"pass"}, {"rows", Align::Right}, {"lowest", Align::Right}, {"highest", Align::Right}, {"measured", Align::Right},
                                   {"predicted before", Align::Right}, {"after", Align::Right}}};
  for (const auto& [key, total] : totals) {
    int count = 0;
    double low = 1, high = 0;
    for (const config::EfficiencyRow& r : rows)
      if (r.family == key.first && r.pass == key.second) {
        ++count;
        low = std::min(low, r.value);
        high = std::max(high, r.value);
      }
    if (count == 0) continue;
    t.rows.push_back({key.first, key.second, fmt::format("{}", count), fmt::format("{:.3g}", low), fmt::format("{:.3g}", high), format_seconds(total.measured),
                      format_seconds(total.before), format_seconds(total.after)});
  }
  d.table(std::move(t));
  d.pairs({{"all ops", fmt::format("measured {}, predicted {} before and {} after", format_seconds(all.measured), format_seconds(all.before), format_seconds(all.after))}});
  d.line(fmt::format("Written: {}", file));
  print(d);
  return 0;
}

} // namespace

Runner add_calibrate(CLI::App& program) {
  auto* command = program.add_subcommand("calibrate", "time the ops of a model and write the efficiencies of a hardware profile");
  auto options = std::make_shared<CalibrateOptions>();
  options->add_to(*command);
  command->add_option("--also", options->also, "more configurations, whose ops are timed as well")->check(CLI::ExistingFile);
  command->add_option("--hardware", options->hardware, "profile to start from: a name, or a file, which is then updated; the configuration's own if not given");
  command->add_option("--profile", options->file, "file to write; NAME.yaml if the profile was given by name");
  command->add_option("--repeats", options->repeats, "steps that are timed")->check(CLI::Range(1, 1000));
  return [options] { return calibrate(*options); };
}

} // namespace gdn::trainer
