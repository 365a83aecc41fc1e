#include "trainer/options.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "core/error.h"
#include "trainer/comm/launch.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

void CommonOptions::add_to(cli::Command& command) {
  command.option("CONFIG", config, "YAML file: a model (its keys, or base: PROFILE), run: and train:").required();
  command.option("--device", device, "cpu, cuda, or auto: cuda where there is one").one_of({"cpu", "cuda", "auto"});
  command.option("--provider", provider, "whose scratch is reserved: the device's own, or upstream: what gdnplan counts for stack megatron")
      .one_of({"upstream"});
  command.option("--budget", budget, "bytes that may be allocated, such as 130GiB (powers of 1024); the device's memory if not given");
  command.option("-o,--output", folder, "folder to write to; runs/<name of CONFIG> if not given");
  command.repeated("--set", [this](const std::string& v) {
    settings.push_back(config::parse_setting(v));
  }, "key=value: a key of the model, of run, or train.KEY");
  command.option("--modules", [this](const std::string& value) {
    for (config::Setting& s : config::modules_settings(value)) settings.push_back(std::move(s));
  }, "recompute modules, separated by commas; 'none' for an empty list");
  command.option("--stack", [this](const std::string& value) {
    settings.push_back({"stack", value, "--stack"});
  }, "megatron or native");
  command.option("--steps", [this](const std::string& value) {
    settings.push_back({"train.steps", value, "--steps"});
  }, "steps to train (train.steps)");
  command.option("--seed", [this](const std::string& value) {
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
  if (this_world().rank() > 0) return;
  report::TextStyle style;
  const char* no_colour = std::getenv("NO_COLOR");
  const bool terminal = isatty(STDOUT_FILENO) != 0 && this_world().size() == 1; // mpirun gives ranks a terminal, whatever reads theirs
  style.colour = terminal && !is_dumb_terminal() && !(no_colour && *no_colour);
  winsize size{};
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40) style.width = size.ws_col;
  else if (const char* columns = std::getenv("COLUMNS"); columns && std::atoi(columns) >= 40) style.width = std::atoi(columns);
  style.width = std::min(style.width, 100);
  fmt::print("{}", report::render_text(document, style));
  std::fflush(stdout);
}

void say(const std::string& line) {
  if (this_world().rank() == 0) fmt::print(stderr, "gdntrain: {}\n", line);
}

namespace {
std::atomic<bool> stop_asked{false};
} // namespace

bool interrupted() {
  static const bool installed = [] {
    struct sigaction action {};
    // The second one does not wait for the step.
    action.sa_handler = [](int) {
      if (stop_asked.exchange(true)) _exit(exit_status(ErrorCode::Interrupted));
    };
    for (int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
    return true;
  }();
  return installed && stop_asked;
}

} // namespace gdn::trainer
