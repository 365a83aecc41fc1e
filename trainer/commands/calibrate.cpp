#include <algorithm>
#include <memory>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <unistd.h>

#include "config/hardware_io.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"
#include "cost/cost.h"
#include "trainer/atomic_file.h"
#include "trainer/bench/collective_times.h"
#include "trainer/bench/efficiencies.h"
#include "trainer/bench/op_times.h"
#include "trainer/bench/versions.h"
#include "trainer/comm/launch.h"
#include "trainer/commands/commands.h"
#include "trainer/commands/measured_with.h"
#include "trainer/devices.h"
#include "trainer/exchange_report.h"
#include "trainer/options.h"
#ifdef GDN_NCCL
#include "trainer/comm/nccl_world.h"
#endif

namespace gdn::trainer {

namespace {

struct CalibrateOptions : CommonOptions {
  std::vector<std::string> also;
  std::string hardware, file;
  int repeats = 0;
};

bool is_file(const std::string& what) { return what.ends_with(".yaml") || what.ends_with(".yml") || what.find('/') != std::string::npos; }

// The configurations as they are timed: with --stack in that one, else in both, but for one that a configuration is not
// legal in. All are read before anything is timed.
std::vector<Setup> setups_of(const CalibrateOptions& o) {
  std::vector<std::string> configs{o.config}, stacks{"native", "megatron"};
  configs.insert(configs.end(), o.also.begin(), o.also.end());
  const bool chosen = std::any_of(o.settings.begin(), o.settings.end(), [](const config::Setting& s) { return s.key == "stack"; });
  std::vector<Setup> setups;
  for (const std::string& config : configs) {
    if (chosen) {
      setups.push_back(load_setup(config, o.settings));
      continue;
    }
    std::vector<Error> refused;
    for (const std::string& stack : stacks) {
      std::vector<config::Setting> settings = o.settings;
      settings.push_back({"stack", stack, "--stack"});
      try {
        setups.push_back(load_setup(config, settings));
      } catch (const Error& e) {
        refused.push_back(e);
        if (refused.size() == stacks.size()) throw refused.front();
        say(fmt::format("{} is not timed in stack {}: {}", config, stack, e.what()));
      }
    }
  }
  const Setup& first = setups.front();
  for (const Setup& s : setups) {
    if (s.profile.run.dtype != first.profile.run.dtype)
      throw Error(ErrorCode::Usage, fmt::format("{} is {}, {} is {}: rows of one file are of one dtype", first.file.string(), name_of(first.profile.run.dtype), s.file.string(),
                                                name_of(s.profile.run.dtype)));
    if (o.hardware.empty() && s.profile.hardware != first.profile.hardware)
      throw Error(ErrorCode::Usage, fmt::format("{} names hardware '{}', {} '{}'", first.file.string(), first.profile.hardware, s.file.string(), s.profile.hardware),
                  "--hardware says which profile the rows are for");
  }
  return setups;
}

// The link between these ranks: one machine's, or the network where each has a machine of its own.
std::string link_of(World& host) {
  std::vector<int> everybody(static_cast<size_t>(host.size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  constexpr size_t kName = 256;
  std::vector<std::byte> mine(kName), all(kName * everybody.size());
  gethostname(reinterpret_cast<char*>(mine.data()), kName - 1);
  host.group(everybody)->all_gather(mine.data(), all.data(), kName);
  std::set<std::string> machines;
  for (size_t r = 0; r < everybody.size(); ++r) machines.insert(reinterpret_cast<const char*>(all.data() + r * kName));
  if (machines.size() == 1) return "scale_up";
  if (machines.size() == everybody.size()) return "network";
  throw Error(ErrorCode::Usage, fmt::format("calibrate: {} ranks on {} machines: their exchanges would be of both links", everybody.size(), machines.size()),
              "start all on one machine, or one on each");
}

// Time of a step's ops by the measurements and by the cost model.
struct Total {
  Seconds measured = 0, before = 0, after = 0;
};

// With several ranks: how long exchanges between their devices take.
int calibrate_exchanges(const CalibrateOptions& o, World& host) {
  const std::unique_ptr<Device> device = make_device(o.device);
  const std::unique_ptr<World> world = device->connect(host);
  if (!world)
    throw Error(ErrorCode::Usage, fmt::format("calibrate on {} ranks times exchanges between GPUs, and '{}' has none", host.size(), device->name()),
                "on one rank it times the ops of a model");
  const std::string wanted = o.hardware.empty() ? load_setup(o.config, o.settings).profile.hardware : o.hardware;
  const config::Hardware before = config::Profiles().hardware(wanted);
  const std::vector<bench::CollectiveTime> times = bench::time_collectives(*world, *device, o.repeats > 0 ? o.repeats : 20);
  std::string versions = bench::versions(device->asynchronous());
#ifdef GDN_NCCL
  versions += ", NCCL " + nccl_version();
#endif
  const std::string source = fmt::format("measured on {} {}: gdntrain calibrate; {}", host.size(), device->name(), versions);
  config::Hardware after = before;
  const std::vector<config::CollectiveRow> rows = bench::fit_collectives(times, before, std::string(device->provider().name()), source, link_of(host));
  bench::replace_collectives(after, rows);
  if (host.rank() > 0) return 0;

  config::Profile measured;
  measured.identity = {{"model", fmt::format("exchanges between {} GPUs", host.size())}, {"provider", std::string(device->provider().name())},
                       {"device", device->name()}, {"hardware", before.name}, {"kind", "measured"}, {"program", "gdntrain"},
                       {"command", fmt::format("mpirun -n {} {}", host.size(), command_line())}, {"versions", versions},
                       {"note", "median over repeats of the exchange alone, of the rank that came last; bytes of the whole matrix, wire: what a rank sends"}};
  measured.sets.push_back({fmt::format("{} ranks", host.size()), {}});
  for (const config::CollectiveRow& r : rows) {
    measured.sets.back().rows.push_back({fmt::format("{}.share", r.kind), r.share, "of the link", fmt::format("fitted: of {} GB/s", before.scale_up / 1e9)});
    measured.sets.back().rows.push_back({fmt::format("{}.latency", r.kind), r.latency, "seconds", "fitted"});
  }
  const cost::CostModel was(before, std::string(device->provider().name()), {}, DType::BF16), is(after, std::string(device->provider().name()), {}, DType::BF16);
  using report::Align;
  report::Document d;
  d.heading(fmt::format("Exchanges between {} {}", host.size(), device->name()));
  report::Table t{"exchanges", {{"kind"}, {"bytes", Align::Right}, {"measured", Align::Right}, {"sent by a rank", Align::Right}, {"predicted before", Align::Right}, {"after", Align::Right}}};
  for (const bench::CollectiveTime& x : times) {
    measured.sets.back().rows.push_back({fmt::format("{}.{}.seconds", x.kind, x.bytes), x.seconds, "seconds", "measured"});
    const model::Collective c{collective_kind(x.kind), model::Group::Tp, x.kind == "p2p" ? 2 : host.size(), x.bytes};
    t.rows.push_back({x.kind, format_bytes(x.bytes), format_seconds(x.seconds), fmt::format("{:.0f} GB/s", x.wire / x.seconds / 1e9), format_seconds(was.seconds(c)),
                      format_seconds(is.seconds(c))});
  }
  d.table(std::move(t));
  const std::filesystem::path written = o.output_folder() / "collectives.yaml";
  write_atomically(written, config::to_yaml(measured));
  const std::string file = !o.file.empty() ? o.file : is_file(wanted) ? wanted : (o.output_folder() / (before.name + ".yaml")).string();
  write_atomically(file, is_file(wanted) ? bench::with_collectives(config::read_text_file(wanted), wanted, rows) : config::to_yaml(config::to_node(after)));
  d.line(fmt::format("Written: {}, {}", written.string(), file));
  print(d);
  return 0;
}

int calibrate(const CalibrateOptions& o) {
  if (World& world = this_world(); world.size() > 1) return calibrate_exchanges(o, world);
  const std::unique_ptr<Device> device = make_device(o.device);
  if (!device->asynchronous()) say("on the CPU: efficiencies of reference arithmetic, of use for trying the command out");
  const int steps = o.repeats > 0 ? o.repeats : device->asynchronous() ? 10 : 2;
  const std::string provider{device->provider().name()};
  const std::vector<Setup> setups = setups_of(o);
  const std::string wanted = o.hardware.empty() ? setups.front().profile.hardware : o.hardware;
  const DType dtype = setups.front().profile.run.dtype;
  const config::Parallel parallel = setups.front().profile.run.parallel;
  std::vector<bench::Sample> samples;
  std::vector<std::string> models;
  for (const Setup& s : setups) {
    for (const bench::OpTime& op : bench::time_ops(s, *device, o.budget_bytes(*device), steps))
      if (!op.communicates) samples.push_back({op.work, op.pass, op.seconds, op.runs});
    if (const std::string name = s.file.stem().string(); models.empty() || models.back() != name) models.push_back(name);
  }
  const config::Hardware before = config::Profiles().hardware(wanted);
  if (before.device_name != device->name())
    say(fmt::format("profile '{}' is of '{}', measured on '{}'", before.name, before.device_name, device->name()));
  const std::string source = fmt::format("measured on one {}: gdntrain calibrate, {}; {}", device->name(), fmt::join(models, ", "), bench::versions(device->asynchronous()));
  const std::vector<config::EfficiencyRow> rows = bench::fit_efficiencies(samples, before, provider, dtype, source);
  config::Hardware after = before;
  bench::replace_efficiencies(after, rows);
  const std::string text = is_file(wanted) ? bench::with_efficiencies(config::read_text_file(wanted), wanted, rows) : config::to_yaml(config::to_node(after));
  const std::string file = !o.file.empty() ? o.file : is_file(wanted) ? wanted : (o.output_folder() / (before.name + ".yaml")).string();
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

cli::Runner add_calibrate(cli::Command& program) {
  cli::Command command = program.subcommand("calibrate", "time the ops of a model in both stacks (or that of --stack), or with several ranks exchanges between their GPUs, and write what a hardware profile says of them");
  auto options = std::make_shared<CalibrateOptions>();
  options->add_to(command);
  command.option("--also", options->also, "more configurations, whose ops are timed as well").existing_file();
  command.option("--hardware", options->hardware, "profile to start from: a name, or a file, which is then updated; the configuration's own if not given");
  command.option("--profile", options->file, "file to write; NAME.yaml in the output folder if the profile was given by name");
  command.option("--repeats", options->repeats, "steps that are timed").between(1, 1000);
  return [options] { return calibrate(*options); };
}

} // namespace gdn::trainer
