#include <chrono>
#include <thread>

#include <doctest/doctest.h>

#include "kills.h"

// gdntrain run: stopped in every way there is, and resumed.
namespace fs = std::filesystem;
using namespace gdn::test;
using namespace std::chrono_literals;

namespace {

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
  CHECK(has(earlier.text, "it holds checkpoints up to step 12, and the one to resume from is of step"));
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
  const auto ours = steps_of(folder / "run"), theirs = steps_of(undisturbed());
  for (int s = 9; s <= kSteps; ++s) CHECK(loss_of(ours.at(s)) == doctest::Approx(loss_of(theirs.at(s))).epsilon(0.01)); // bf16
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
    Process p(small_run(folder / "run", {"--steps", "100000", "--checkpoint", (folder / "kept").string()}), folder / "run/output.txt");
    wait_for_step(p, folder / "run");
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
  Process p(small_run(folder / "run", {"--steps", "100000", "--set", "seq_length=2048", "--checkpoint", (folder / "kept").string()}), folder / "run/output.txt");
  wait_for_step(p, folder / "run");
  while (p.running()) { // whatever the load: one of them comes before the step is done
    p.signal(SIGTERM);
    std::this_thread::sleep_for(20ms);
  }
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

TEST_CASE("kill -9 at random moments: always resumes from a whole checkpoint, to the same losses") { kill_and_resume({}, 8); }
