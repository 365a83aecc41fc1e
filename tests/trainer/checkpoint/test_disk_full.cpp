#include <algorithm>
#include <chrono>
#include <thread>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "small_disk.h"
#include "small_run.h"

// A file system without room for the next checkpoint.
namespace fs = std::filesystem;
using namespace gdn::test;
using namespace std::chrono_literals;

namespace {

const Layout kOne{}, kEp2{2, {"expert_model_parallel_size=2", "moe_imbalance=2"}};
const Arguments kEvery{"--checkpoint-every", "1"};

bool have_mpirun() { return std::system("command -v mpirun >/dev/null") == 0; }

// A message that says what, where and what to do; the checkpoint before is whole, and nothing half-written lies there.
void check_full(const Ended& full, const fs::path& kept, int last) {
  CAPTURE(full.text);
  CHECK(full.status == 1);
  CHECK(has(full.text, fmt::format("the checkpoint of step {} could not be written: {}.part/rank_0000", last + 1, checkpoint_of(kept, last + 1).string())));
  CHECK(has(full.text, fmt::format("the one of step {} is whole: make room, then --resume", last)));
  for (const auto& e : fs::directory_iterator(kept)) CHECK(e.path().extension() != ".part");
}

void check_goes_on(const Layout& layout, const fs::path& output, const fs::path& kept, int last) {
  const Ended on = run(layout, output, joined(kEvery, {"--steps", std::to_string(last + 2), "--checkpoint", kept, "--resume"}));
  CHECK_MESSAGE(on.status == 0, on.text);
  CHECK(has(on.text, fmt::format("resuming after step {} ", last)));
  CHECK(static_cast<int>(steps_of(output).size()) == last + 2);
}

} // namespace

TEST_CASE("disk full: one rank, and two") {
  const TemporaryFolder folder;
  const SmallDisk disk(folder / "disk");
  if (!disk.mounted()) {
    MESSAGE("no file system may be mounted here: only the limit of a file's size is tested (below, and in trainer-checkpoint-resume)");
    return;
  }
  for (const Layout& layout : {kOne, kEp2}) {
    if (layout.ranks > 1 && !have_mpirun()) continue;
    const std::string name = std::to_string(layout.ranks);
    const fs::path output = folder / name, kept = folder / "disk" / name;
    const Ended first = run(layout, output, joined(kEvery, {"--steps", "4"}));
    REQUIRE_MESSAGE(first.status == 0, first.text);
    const auto expected = steps_of(output);
    const auto weights = weights_of(output / "checkpoints", 4);
    // Room for two checkpoints and a half.
    std::uintmax_t size = 0;
    for (const auto& e : fs::directory_iterator(checkpoint_of(output / "checkpoints", 4))) size += fs::file_size(e.path());
    disk.leave_room(static_cast<std::int64_t>(size * 5 / 2));
    const Ended full = run(layout, output, joined(kEvery, {"--steps", "4", "--checkpoint", kept}));
    CHECK(has(full.text, "No space left on device"));
    check_full(full, kept, 2);
    disk.leave_all_room();
    check_goes_on(layout, output, kept, 2);
    CHECK(steps_of(output) == expected);
    CHECK(weights_of(kept, 4) == weights);
  }
}

TEST_CASE("disk full: the log, beside the checkpoints") {
  const TemporaryFolder folder;
  const SmallDisk disk(folder / "disk");
  if (!disk.mounted()) {
    MESSAGE("no file system may be mounted here: not tested");
    return;
  }
  const fs::path output = folder / "disk/run";
  const Ended first = run(output, joined(kEvery, {"--steps", "2"}));
  REQUIRE_MESSAGE(first.status == 0, first.text);
  disk.leave_room(0);
  Process p(small_run(output, joined(kEvery, {"--steps", "4", "--resume"})), folder / "output.txt");
  CHECK(p.wait() == 1);
  const std::string text = read_bytes(folder / "output.txt");
  CHECK_MESSAGE(has(text, "No space left on device"), text);
  CHECK(has(text, output.string()));
  CHECK(has(text, "make room"));
  disk.leave_all_room();
  const Ended on = run(output, joined(kEvery, {"--steps", "4", "--resume"}));
  CHECK_MESSAGE(on.status == 0, on.text);
  CHECK(has(on.text, "resuming after step 2"));
  CHECK(steps_of(output).size() == 4);
}

TEST_CASE("disk full: for one of two ranks only") {
  if (!have_mpirun()) {
    MESSAGE("no mpirun here: not tested");
    return;
  }
  const TemporaryFolder folder;
  const fs::path output = folder / "run", kept = output / "checkpoints";
  fs::create_directories(output);
  Process p(launched(kEp2, output, joined(kEvery, {"--steps", "100000", "--keep", "2"})), output / "output.txt");
  while (p.running() && !fs::exists(checkpoint_of(kept, 1))) std::this_thread::sleep_for(5ms);
  const auto running = processes_naming(output.string());
  REQUIRE_MESSAGE(running.size() == 3, read_bytes(output / "output.txt"));
  const pid_t rank = running.back(); // mpirun has the lowest number
  const rlimit limit{1000, 1000};
  REQUIRE(::prlimit(rank, RLIMIT_FSIZE, &limit, nullptr) == 0);
  const int status = p.wait();
  const std::string text = read_bytes(output / "output.txt");
  int last = 0;
  for (const auto& e : fs::directory_iterator(kept)) last = std::max(last, std::stoi(e.path().filename().string().substr(5)));
  CHECK(has(text, "File too large"));
  check_full({status, text}, kept, last);
  check_goes_on(kEp2, output, kept, last);
}
