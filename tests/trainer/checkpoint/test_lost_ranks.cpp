#include <chrono>

#include <doctest/doctest.h>

#include "kills.h"

// Ranks under mpirun that are killed, interrupted, or fail.
namespace fs = std::filesystem;
using namespace gdn::test;
using namespace std::chrono_literals;

namespace {

const Layout kEp2{2, {"expert_model_parallel_size=2", "moe_imbalance=2"}};

// The ranks of a running mpirun.
std::vector<pid_t> ranks_of(const Process& launcher, const fs::path& output) {
  std::vector<pid_t> all = processes_naming(output.string());
  std::erase(all, launcher.pid());
  return all;
}

} // namespace

TEST_CASE("kill -9 of any rank or of mpirun at random moments: always resumes, to the same losses") { kill_and_resume(kEp2, 4); }

TEST_CASE("signals: SIGUSR1 to mpirun, or any to one rank: the step is finished, a checkpoint written, 130") {
  struct Sent {
    int signal;
    bool to_rank;
  };
  for (const Sent sent : {Sent{SIGUSR1, false}, Sent{SIGINT, true}, Sent{SIGTERM, true}}) {
    const TemporaryFolder folder;
    const fs::path output = folder / "run";
    fs::create_directories(output);
    Process p(launched(kEp2, output, {"--steps", "100000", "--checkpoint", folder / "kept"}), output / "output.txt");
    wait_for_step(p, output);
    if (sent.to_rank) ::kill(ranks_of(p, output).back(), sent.signal);
    else p.signal(sent.signal);
    CHECK(p.wait() == 130);
    CHECK(seconds_until_gone(output.string()) < kSoon);
    const std::string text = read_bytes(output / "output.txt");
    const int step = static_cast<int>(steps_of(output).size());
    CAPTURE(text);
    CHECK(has(text, "interrupted after step " + std::to_string(step)));
    CHECK(has(text, "--resume goes on after step " + std::to_string(step)));
    CHECK(count(folder / "kept") == 1);
    CHECK(fs::exists(checkpoint_of(folder / "kept", step) / "checkpoint.json"));
  }
}

// mpirun leaves its ranks a second, then kills them, and returns a status of its own.
TEST_CASE("signals: SIGINT and SIGTERM to mpirun end everything, and the newest checkpoint is whole") {
  for (int number : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    const fs::path output = folder / "run";
    fs::create_directories(output);
    Process p(launched(kEp2, output, {"--steps", "100000", "--checkpoint-every", "1", "--keep", "2"}), output / "output.txt");
    wait_for_step(p, output, 2);
    REQUIRE_MESSAGE(p.running(), read_bytes(output / "output.txt"));
    p.signal(number);
    CHECK(p.wait() != 0);
    CHECK(seconds_until_gone(output.string()) < kSoon);
    const int logged = static_cast<int>(steps_of(output).size());
    const Ended on = run(kEp2, output, {"--steps", std::to_string(logged + 1), "--checkpoint-every", "1", "--keep", "2", "--resume"});
    CHECK_MESSAGE(on.status == 0, on.text);
    CHECK_MESSAGE(has(on.text, "resuming after step"), on.text);
    CHECK(!has(on.text, "trying the one before"));
    CHECK(static_cast<int>(steps_of(output).size()) == logged + 1);
  }
}

TEST_CASE("a rank that fails ends all with its message and exit status: data that only one rank lacks") {
  const TemporaryFolder folder;
  const fs::path output = folder / "run";
  Arguments command = launched({1, {"gpus=2"}}, output);
  command = joined({"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "1"}, joined(command, joined({":", "-n", "1"}, command)));
  command = joined(command, sets({"train.data_path=" + (folder / "nothing.txt").string()}));
  const auto start = std::chrono::steady_clock::now();
  const Ended e = finish(command, output);
  CHECK(e.status == 2);
  CHECK_MESSAGE(has(e.text, "gdntrain: error: rank 1: train.data_path: '" + (folder / "nothing.txt").string() + "' is not there"), e.text);
  CHECK(seconds_until_gone(output.string()) < kSoon);
  CHECK(std::chrono::steady_clock::now() - start < 20s);
}
