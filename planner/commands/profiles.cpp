#include <fmt/format.h>

#include "config/hardware_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "model/parameters.h"
#include "planner/commands/commands.h"
#include "planner/options.h"

namespace gdn::planner {

namespace {

struct ProfilesCommand {
  std::string what, folder;
  OutputOptions output;

  config::Profiles open() const {
    return config::Profiles(folder.empty() ? std::nullopt : std::optional(folder));
  }

  int list() {
    const config::Profiles profiles = open();
    Output out;
    out.text.heading("Models");
    report::Table models{"models", {{"name"}, {"parameters", report::Align::Right}, {"layers", report::Align::Left, true}, {"also", report::Align::Left, true}}};
    for (const auto& l : profiles.models()) {
      const config::Model m = profiles.model(l.name).model;
      const std::int64_t total = model::totals(model::parameter_table(m)).sum();
      std::vector<std::pair<std::string, int>> kinds;
      for (config::LayerKind k : m.mixers) {
        const std::string name = k == config::LayerKind::Unmodelled ? m.unmodelled_kind : std::string(config::name_of(k));
        if (auto it = std::find_if(kinds.begin(), kinds.end(), [&](auto& p) { return p.first == name; }); it != kinds.end()) ++it->second;
        else kinds.push_back({name, 1});
      }
      std::vector<std::string> words;
      for (auto& [name, n] : kinds) words.push_back(fmt::format("{} {}", n, name));
      models.rows.push_back({l.name, format_count(total), m.parameters_only ? fmt::format("{} (parameters only)", fmt::join(words, " + ")) : fmt::format("{}", fmt::join(words, " + ")), fmt::format("{}", fmt::join(l.aliases, ", "))});
    }
    out.text.table(std::move(models)).heading("Hardware");
    report::Table gpus{"hardware", {{"name"}, {"memory", report::Align::Right}, {"bf16 TFLOP/s", report::Align::Right}, {"TB/s", report::Align::Right}, {"also", report::Align::Left, true}}};
    for (const auto& l : profiles.hardwares()) {
      const config::Hardware h = profiles.hardware(l.name);
      gpus.rows.push_back({l.name, format_gib(h.memory), fmt::format("{:.0f}", h.bf16 / 1e12), fmt::format("{:.2f}", h.bandwidth / 1e12), fmt::format("{}", fmt::join(l.aliases, ", "))});
    }
    out.text.table(std::move(gpus));
    out.json = [&] {
      Json j{{"schema", "gdnplan.profiles/1"}};
      for (const auto& l : profiles.models()) j["models"].push_back({{"name", l.name}, {"aliases", l.aliases}, {"origin", l.origin}});
      for (const auto& l : profiles.hardwares()) j["hardware"].push_back({{"name", l.name}, {"aliases", l.aliases}, {"origin", l.origin}});
      return j;
    };
    write(out, output);
    return 0;
  }

  int show() {
    const config::Profiles profiles = open();
    std::string yaml;
    bool hardware = false;
    for (const auto& l : profiles.hardwares())
      hardware = hardware || l.name == what || std::find(l.aliases.begin(), l.aliases.end(), what) != l.aliases.end();
    yaml = config::to_yaml(hardware ? config::to_node(profiles.hardware(what)) : config::to_node(profiles.model(what)));
    Output out;
    out.text.verbatim(yaml.substr(0, yaml.find_last_not_of('\n') + 1), 0);
    write(out, output);
    return 0;
  }
};

} // namespace

cli::Runner add_profiles(cli::Command& program) {
  auto command = std::make_shared<ProfilesCommand>();
  cli::Command app = program.subcommand("profiles", "models and hardware that are built in or in --profiles DIR");
  cli::Command list = app.subcommand("list", "names, totals, aliases");
  cli::Command show = app.subcommand("show", "one profile as YAML, with every source");
  for (cli::Command sub : {list, show}) sub.option("--profiles", command->folder, "folder that adds or overrides profiles");
  command->output.add_to(list, {"text", "json", "csv"});
  show.option("NAME", command->what, "a model or hardware profile").required();
  app.needs_subcommand(0, 1);
  return [command, show] { return show.chosen() ? command->show() : command->list(); };
}

} // namespace gdn::planner
