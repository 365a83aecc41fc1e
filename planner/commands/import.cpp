#include <filesystem>

#include <fmt/core.h>

#include "config/import.h"
#include "config/run_io.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/options.h"

namespace gdn::planner {

namespace {

struct ImportCommand {
  std::string source, model;
  OutputOptions output;

  int run() {
    const bool is_json = source.size() > 5 && source.substr(source.size() - 5) == ".json";
    return is_json || std::filesystem::exists(std::filesystem::path(source) / "config.json") ? hugging_face() : megatron();
  }

  int emit(const config::Node& node, const std::vector<std::string>& notes, const std::vector<std::string>& unread) {
    const std::string yaml = config::to_yaml(node);
    Output out;
    out.text.verbatim(yaml.substr(0, yaml.find_last_not_of('\n') + 1), 0);
    out.yaml = [&] { return yaml; };
    out.json = [&] { return Json{{"schema", "gdnplan.import/1"}, {"yaml", yaml}, {"notices", notes}, {"unread", unread}, {"assumptions", Json::array()}}; };
    write(out, output);
    for (const std::string& n : notes) fmt::print(stderr, "gdnplan: note: {}\n", n);
    for (const std::string& u : unread) fmt::print(stderr, "gdnplan: not read: {}\n", u);
    return 0;
  }

  int hugging_face() {
    const config::ModelProfile profile = config::Profiles().model(source);
    return emit(config::to_node(profile), profile.notes, {});
  }

  // A file of arguments, or the arguments themselves.
  int megatron() {
    const bool file = std::filesystem::exists(source);
    if (!file && source.find("--") == std::string::npos)
      throw Error(ErrorCode::Config, fmt::format("'{}' is neither a file nor Megatron-LM arguments", source),
                  "give a config.json, a file of arguments, or a quoted line such as \"--num-layers 48 ...\"");
    const config::MegatronArguments read = config::read_megatron_arguments(file ? config::read_text_file(source) : source, file ? source : "arguments");
    config::Run run;
    for (const config::Setting& s : read.run) config::apply(run, s.key, s.value, s.where);
    config::Node node = config::to_node(run);
    if (read.model.kind == config::Node::Kind::Map) {
      config::Node whole = read.model;
      whole.set("run", std::move(node));
      node = std::move(whole);
    }
    return emit(node, read.notes, read.unread);
  }
};

} // namespace

cli::Runner add_import(cli::Command& program) {
  auto command = std::make_shared<ImportCommand>();
  cli::Command app = program.subcommand("import", "a Hugging Face config.json or Megatron-LM arguments, as YAML");
  app.allow_extras(); // Megatron's arguments look like options: what is not ours is SOURCE
  command->output.add_to(app, {"text", "json", "yaml"});
  app.footer("SOURCE is a config.json, its folder, a file of Megatron arguments, or the arguments themselves.\n"
              "Example: gdnplan import ./config.json -o model.yaml\nArguments that nothing reads are listed on stderr.");
  return [command, app] {
    const std::vector<std::string> words = app.extras();
    command->source = join(words);
    if (command->source.empty()) throw Error(ErrorCode::Usage, "import needs a SOURCE", "a config.json, or Megatron-LM arguments");
    return command->run();
  };
}

} // namespace gdn::planner
