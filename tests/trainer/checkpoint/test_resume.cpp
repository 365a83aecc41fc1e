#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "process.h"
#include "temporary_folder.h"

// gdntrain run: stopped in every way there is, and resumed.
namespace fs = std::filesystem;
using gdn::test::Process;
using gdn::test::read_bytes;
using gdn::test::TemporaryFolder;
using namespace std::chrono_literals;

namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  REQUIRE_MESSAGE(value, name << " is not set");
  return value;
}

constexpr int kSteps = 12;

// A small run: a step takes milliseconds.
std::vector<std::string> command(const fs::path& output, std::vector<std::string> more = {}) {
  std::vector<std::string> c{environment("GDNTRAIN"), "run", environment("GDN_SOURCE_ROOT") + "/examples/tiny.yaml", "--device", "cpu",
                             "--set", "hidden_size=32", "--set", "num_hidden_layers=2", "--set", "full_attention_interval=2", "--set", "moe_intermediate_size=16",
                             "--set", "moe_shared_expert_intermediate_size=16", "--set", "seq_length=32", "--set", "micro_batch_size=1", "--set", "global_batch_size=2",
                             "-o", output.string()};
  if (std::find(more.begin(), more.end(), "--steps") == more.end()) c.insert(c.end(), {"--steps", std::to_string(kSteps)});
  c.insert(c.end(), more.begin(), more.end());
  return c;
}

struct Ended {
  int status;
  std::string text;
};
Ended run(const fs::path& output, std::vector<std::string> more = {}, rlim_t file_size = 0) {
  fs::create_directories(output);
  Process p(command(output, std::move(more)), output / "output.txt", file_size);
  const int status = p.wait();
  return {status, read_bytes(output / "output.txt")};
}

// Everything of a step that is no time: exact text of loss, gradient norm and the rest.
std::map<int, std::string> steps_of(const fs::path& output) {
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

std::map<std::string, std::string> weights_of(const fs::path& checkpoints, int step) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%08d", step);
  return {{"weights", read_bytes(checkpoints / name / "rank_00000.safetensors")}};
}

// The run that nothing disturbs, once for all cases.
const fs::path& undisturbed() {
  static const TemporaryFolder folder;
  static const fs::path path = [] {
    const Ended e = run(folder / "run", {"--checkpoint-every", "4"});
    REQUIRE_MESSAGE(e.status == 0, e.text);
    return folder / "run";
  }();
  return path;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

int count(const fs::path& folder) { return static_cast<int>(std::distance(fs::directory_iterator(folder), {})); }

} // namespace

TEST_CASE("resume: stopped after a checkpoint, the rest is the same to the last bit") {
  const fs::path& whole = undisturbed();
  REQUIRE(steps_of(whole).size() == kSteps);
  CHECK(count(whole / "checkpoints") == 3); // 4, 8 and the last
  for (const char* from : {"4", "8"}) {
    const TemporaryFolder folder;
    fs::copy(whole, folder / "run", fs::copy_options::recursive);
    for (const char* later : {"step_00000008", "step_00000012"})
      if (std::string(later) != std::string("step_0000000") + from) fs::remove_all(folder / "run/checkpoints" / later);
    const Ended e = run(folder / "run", {"--checkpoint-every", "4", "--resume", from});
    CHECK_MESSAGE(e.status == 0, e.text);
    CHECK(has(e.text, std::string("resuming after step ") + from));
    CHECK(!has(e.text, "changed since the checkpoint"));
    CHECK(steps_of(folder / "run") == steps_of(whole));
    CHECK(weights_of(folder / "run/checkpoints", kSteps) == weights_of(whole / "checkpoints", kSteps));
  }
}

TEST_CASE("resume: what changed is said, another model is refused, and a folder in use is not overwritten") {
  const TemporaryFolder folder;
  fs::copy(undisturbed(), folder / "run", fs::copy_options::recursive);
  const Ended again = run(folder / "run", {"--checkpoint-every", "4"});
  CHECK(again.status == 2);
  CHECK(has(again.text, "it holds checkpoints of another run, up to step 12"));
  const Ended earlier = run(folder / "run", {"--checkpoint-every", "4", "--resume", "4"});
  CHECK(earlier.status == 2);
  CHECK(has(earlier.text, "it holds checkpoints up to step 12, after the one to resume from"));
  const Ended done = run(folder / "run", {"--resume"});
  CHECK(done.status == 0);
  CHECK(has(done.text, "all 12 steps are done"));
  const Ended more = run(folder / "run", {"--resume", "--set", "train.lr=1e-3", "--steps", "13"});
  CHECK_MESSAGE(more.status == 0, more.text);
  CHECK(has(more.text, "changed since the checkpoint: train.lr was 0.003, is 0.001"));
  CHECK(has(more.text, "changed since the checkpoint: train.steps was 12, is 13"));
  const Ended other = run(folder / "run", {"--resume", "--steps", "20", "--set", "linear_num_value_heads=2"});
  CHECK(other.status == 1);
  CHECK(has(other.text, "it is of another model: linear_num_value_heads is 4, here 2"));
  const Ended nowhere = run(folder / "run", {"--resume", (folder / "nothing").string()});
  CHECK(nowhere.status == 1);
  CHECK(has(nowhere.text, "no such checkpoint"));
  const Ended fresh = run(folder / "fresh", {"--resume", "--steps", "1"});
  CHECK_MESSAGE(fresh.status == 0, fresh.text);
  CHECK(has(fresh.text, "starting at step 1"));
}

TEST_CASE("resume: the other stack goes on from the same state") {
  const TemporaryFolder folder;
  fs::copy(undisturbed(), folder / "run", fs::copy_options::recursive);
  const Ended e = run(folder / "run", {"--resume", "8", "--stack", "native", "--modules", "none"});
  CHECK_MESSAGE(e.status == 0, e.text);
  CHECK(has(e.text, "changed since the checkpoint: run.stack was megatron, is native"));
  const auto loss = [](const std::string& line) { return std::stod(line); };
  const auto ours = steps_of(folder / "run"), theirs = steps_of(undisturbed());
  for (int s = 9; s <= kSteps; ++s) CHECK(loss(ours.at(s)) == doctest::Approx(loss(theirs.at(s))).epsilon(0.01)); // bf16
}

TEST_CASE("resume: keep") {
  const TemporaryFolder folder;
  const Ended e = run(folder / "run", {"--checkpoint", (folder / "kept").string(), "--checkpoint-every", "1", "--keep", "2"});
  CHECK_MESSAGE(e.status == 0, e.text);
  CHECK(count(folder / "kept") == 2);
  CHECK(fs::exists(folder / "kept/step_00000011/checkpoint.json"));
  CHECK(weights_of(folder / "kept", kSteps) == weights_of(undisturbed() / "checkpoints", kSteps));
}

TEST_CASE("signals: the step is finished, a checkpoint written, 130; a second one does not wait") {
  for (int number : {SIGINT, SIGTERM, SIGUSR1}) {
    const TemporaryFolder folder;
    fs::create_directories(folder / "run");
    Process p(command(folder / "run", {"--steps", "100000", "--checkpoint", (folder / "kept").string()}), folder / "run/output.txt");
    while (p.running() && !(fs::exists(folder / "run/log.jsonl") && fs::file_size(folder / "run/log.jsonl") > 0)) std::this_thread::sleep_for(5ms);
    p.signal(number);
    CHECK(p.wait() == 130);
    const auto steps = steps_of(folder / "run");
    const std::string text = read_bytes(folder / "run/output.txt");
    CHECK(has(text, "interrupted after step " + std::to_string(steps.size())));
    CHECK(has(text, "--resume goes on after step " + std::to_string(steps.size())));
    CHECK(count(folder / "kept") == 1);
  }
  const TemporaryFolder folder;
  fs::create_directories(folder / "run");
  // A step of many tokens: the second signal comes while it runs.
  Process p(command(folder / "run", {"--steps", "100000", "--set", "seq_length=2048", "--checkpoint", (folder / "kept").string()}), folder / "run/output.txt");
  while (p.running() && !(fs::exists(folder / "run/log.jsonl") && fs::file_size(folder / "run/log.jsonl") > 0)) std::this_thread::sleep_for(5ms);
  p.signal(SIGTERM);
  std::this_thread::sleep_for(20ms);
  p.signal(SIGTERM);
  CHECK(p.wait() == 130);
  CHECK(!has(read_bytes(folder / "run/output.txt"), "interrupted after step"));
  CHECK(!fs::exists(folder / "kept"));
}

TEST_CASE("disk full: a message, and the last checkpoint is whole") {
  const TemporaryFolder folder;
  const Ended first = run(folder / "run", {"--steps", "2", "--checkpoint-every", "1"});
  REQUIRE_MESSAGE(first.status == 0, first.text);
  const auto size = fs::file_size(folder / "run/checkpoints/step_00000002/rank_00000.safetensors");
  const Ended full = run(folder / "run", {"--steps", "5", "--checkpoint-every", "1", "--resume"}, size - 1000);
  CHECK(full.status == 1);
  CHECK(has(full.text, "the checkpoint of step 3 could not be written: "));
  CHECK(has(full.text, "the one of step 2 is whole: make room, then --resume"));
  CHECK(count(folder / "run/checkpoints") == 2);
  const Ended on = run(folder / "run", {"--steps", "5", "--checkpoint-every", "1", "--resume"});
  CHECK_MESSAGE(on.status == 0, on.text);
  CHECK(has(on.text, "resuming after step 2"));
}

// GDN_KILLS: how many; the default keeps a test run short.
TEST_CASE("kill -9 at random moments: always resumes from a whole checkpoint, to the same losses") {
  const char* wanted = std::getenv("GDN_KILLS");
  const int kills = wanted ? std::atoi(wanted) : 8;
  const TemporaryFolder folder;
  const fs::path output = folder / "run";
  fs::create_directories(output);
  const std::vector<std::string> checkpointing{"--checkpoint-every", "1", "--keep", "2", "--resume"};
  std::mt19937 random(20261129); // how long each one lives
  int killed = 0, finished = 0, resumed = 0, parts = 0;
  const auto began = std::chrono::steady_clock::now();
  const Ended undisturbed_run = run(folder / "alone", {"--checkpoint-every", "1"});
  REQUIRE_MESSAGE(undisturbed_run.status == 0, undisturbed_run.text);
  // Seconds that a process may live: about as long as a whole run; more where runs get nowhere.
  double limit = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  auto newest = [&] {
    std::string name;
    if (fs::exists(output / "checkpoints"))
      for (const fs::directory_entry& e : fs::directory_iterator(output / "checkpoints"))
        if (e.path().extension() != ".part") name = std::max(name, e.path().filename().string());
    return name;
  };
  while (killed < kills) {
    const auto start = std::chrono::steady_clock::now();
    const std::string before = newest();
    Process p(command(output, checkpointing), output / "output.txt");
    const double life = std::uniform_real_distribution<double>(0, limit)(random);
    while (p.running() && std::chrono::steady_clock::now() - start < std::chrono::duration<double>(life)) std::this_thread::sleep_for(1ms);
    const bool hit = p.running();
    if (hit) p.signal(SIGKILL);
    const int status = p.wait();
    const bool wrote = std::filesystem::exists(output / "output.txt"); // not if killed before its first line
    const std::string text = wrote ? read_bytes(output / "output.txt") : "";
    resumed += has(text, "resuming after step");
    if (fs::exists(output / "checkpoints"))
      for (const fs::directory_entry& e : fs::directory_iterator(output / "checkpoints")) parts += e.path().extension() == ".part";
    if (hit && status == 128 + SIGKILL) {
      ++killed;
      CHECK_MESSAGE(!has(text, "error"), text);
      if (newest() == before) limit *= 1.2;
      continue;
    }
    CHECK_MESSAGE(status == 0, text); // it got to the end: check, then start over
    CHECK(steps_of(output) == steps_of(undisturbed()));
    ++finished;
    fs::remove_all(output);
    fs::create_directories(output);
  }
  const Ended last = run(output, checkpointing);
  CHECK_MESSAGE(last.status == 0, last.text);
  if (has(last.text, "all 12 steps are done")) CHECK(!steps_of(output).empty());
  CHECK(steps_of(output) == steps_of(undisturbed()));
  CHECK(weights_of(output / "checkpoints", kSteps) == weights_of(undisturbed() / "checkpoints", kSteps));
  CHECK(resumed > 0);
  MESSAGE(killed, " kills, ", resumed, " times resumed, ", finished + 1, " runs to the end, ", parts, " times a half-written checkpoint lay there");
}
