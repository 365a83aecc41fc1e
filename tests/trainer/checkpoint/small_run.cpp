#include "small_run.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace gdn::test {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  REQUIRE_MESSAGE(value, std::string(name) << " is not set");
  return value;
}

Arguments sets(const std::vector<std::string>& settings) {
  Arguments out;
  for (const std::string& s : settings) out.insert(out.end(), {"--set", s});
  return out;
}

Arguments joined(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Arguments small_run(const std::filesystem::path& output, const Arguments& more) {
  Arguments c{environment("GDNTRAIN"), "run", environment("GDN_SOURCE_ROOT") + "/examples/tiny.yaml", "--device", "cpu", "-o", output.string()};
  c = joined(c, sets({"hidden_size=32", "num_hidden_layers=2", "full_attention_interval=2", "moe_intermediate_size=16",
                      "moe_shared_expert_intermediate_size=16", "seq_length=32", "micro_batch_size=1", "global_batch_size=2"}));
  if (std::find(more.begin(), more.end(), "--steps") == more.end()) c = joined(c, {"--steps", std::to_string(kSteps)});
  return joined(c, more);
}

Arguments launched(const Layout& layout, const std::filesystem::path& output, const Arguments& more) {
  const Arguments run = small_run(output, joined(sets(layout.settings), more));
  if (layout.ranks == 1) return run;
  return joined({"mpirun", "-n", std::to_string(layout.ranks), "--oversubscribe", "--bind-to", "none"}, run);
}

Ended finish(const Arguments& command, const std::filesystem::path& output, rlim_t file_size) {
  std::filesystem::create_directories(output);
  Process p(command, output / "output.txt", file_size);
  const int status = p.wait();
  return {status, read_bytes(output / "output.txt")};
}
Ended run(const Layout& layout, const std::filesystem::path& output, const Arguments& more) {
  return finish(launched(layout, output, more), output);
}
Ended run(const std::filesystem::path& output, const Arguments& more, rlim_t file_size) {
  return finish(small_run(output, more), output, file_size);
}

std::map<int, std::string> steps_of(const std::filesystem::path& output) {
  std::map<int, std::string> steps;
  std::istringstream in(read_bytes(output / "log.jsonl"));
  for (std::string line; std::getline(in, line);) {
    const auto j = nlohmann::json::parse(line);
    const int step = j["step"];
    CHECK_MESSAGE(steps.count(step) == 0, "step " << step << " is logged twice");
    steps[step] = j["loss"].dump() + " " + j["aux_loss"].dump() + " " + j["gradient_norm"].dump() + " " + j["learning_rate"].dump() + " " + j["expert_load"].dump();
  }
  return steps;
}
double loss_of(const std::string& step) { return std::stod(step); }

std::filesystem::path checkpoint_of(const std::filesystem::path& checkpoints, int step) { return checkpoints / fmt::format("step_{:08}", step); }

std::map<std::string, std::string> weights_of(const std::filesystem::path& checkpoints, int step) {
  std::map<std::string, std::string> files;
  for (const auto& e : std::filesystem::directory_iterator(checkpoint_of(checkpoints, step)))
    if (e.path().extension() == ".safetensors") files[e.path().filename()] = read_bytes(e.path());
  REQUIRE(!files.empty());
  return files;
}

bool has(std::string text, const std::string& part) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.find(part) != std::string::npos;
}

int count(const std::filesystem::path& folder) { return static_cast<int>(std::distance(std::filesystem::directory_iterator(folder), {})); }

void wait_for_step(Process& p, const std::filesystem::path& output, int steps) {
  auto logged = [&] {
    std::ifstream in(output / "log.jsonl");
    return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
  };
  while (p.running() && logged() < steps) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

double seconds_until_gone(const std::string& text, double limit) {
  const auto start = std::chrono::steady_clock::now();
  double seconds = 0;
  while (!processes_naming(text).empty() && seconds < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return seconds;
}

} // namespace gdn::test
