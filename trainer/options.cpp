#include "trainer/options.h"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>
#include <unistd.h>

#include "core/error.h"

namespace gdn::trainer {

void CommonOptions::add_to(CLI::App& command) {
  command.add_option("CONFIG", config, "YAML file: a model (its keys, or base: PROFILE), run: and train:")->required();
  command.add_option("--device", device, "cpu, cuda, or auto: cuda where there is one")->check(CLI::IsMember({"cpu", "cuda", "auto"}));
  command.add_option("--provider", provider, "whose scratch is reserved: the device's own, or upstream: what gdnplan counts for stack megatron")
      ->check(CLI::IsMember({"upstream"}));
  command.add_option("--budget", budget, "bytes that may be allocated, such as 130GiB (powers of 1024); the device's memory if not given");
  command.add_option("-o,--output", folder, "folder to write to; runs/<name of CONFIG> if not given");
  command.add_option_function<std::vector<std::string>>("--set", [this](const std::vector<std::string>& values) {
    for (const std::string& v : values) settings.push_back(config::parse_setting(v));
  }, "key=value: a key of the model, of run, or train.KEY")->take_all();
  command.add_option_function<std::string>("--modules", [this](const std::string& value) {
    settings.push_back({"recompute_modules", value == "none" ? "[]" : value, "--modules"});
    settings.push_back({"recompute_granularity", "selective", "--modules"});
  }, "recompute modules, separated by commas; 'none' for an empty list");
  command.add_option_function<std::string>("--stack", [this](const std::string& value) {
    settings.push_back({"stack", value, "--stack"});
  }, "megatron or native");
  command.add_option_function<std::string>("--steps", [this](const std::string& value) {
    settings.push_back({"train.steps", value, "--steps"});
  }, "steps to train (train.steps)");
  command.add_option_function<std::string>("--seed", [this](const std::string& value) {
    settings.push_back({"train.seed", value, "--seed"});
  }, "seed of weights and data (train.seed)");
}

Bytes CommonOptions::budget_bytes(const Device& d) const { return budget.empty() ? d.memory() : parse_bytes(budget, "--budget"); }

const model::Provider& CommonOptions::laid_out_for(const Device& d) const {
  return provider == "upstream" ? model::upstream_provider() : d.provider();
}

std::filesystem::path CommonOptions::output_folder() const {
  const std::filesystem::path path = folder.empty() ? std::filesystem::path("runs") / std::filesystem::path(config).stem() : std::filesystem::path(folder);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw Error(ErrorCode::Io, fmt::format("cannot create '{}': {}", path.string(), error.message()));
  return path;
}

void print(const report::Document& document) {
  report::TextStyle style;
  const char* no_colour = std::getenv("NO_COLOR");
  style.colour = isatty(STDOUT_FILENO) != 0 && !(no_colour && *no_colour);
  fmt::print("{}", report::render_text(document, style));
  std::fflush(stdout);
}

void say(const std::string& line) { fmt::print(stderr, "gdntrain: {}\n", line); }

namespace {
std::atomic<bool> stop_asked{false};
} // namespace

bool interrupted() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_handler = [](int) { stop_asked = true; };
    for (int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
    return true;
  }();
  return installed && stop_asked;
}

} // namespace gdn::trainer
