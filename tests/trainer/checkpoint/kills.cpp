#include "kills.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>

#include <doctest/doctest.h>

namespace gdn::test {

void kill_and_resume(const Layout& layout, int kills) {
  if (const char* wanted = std::getenv("GDN_KILLS")) kills = std::atoi(wanted);
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const TemporaryFolder folder;
  const std::filesystem::path output = folder / "run", alone = folder / "alone";
  const auto began = Clock::now();
  const Ended undisturbed = run(layout, alone, {"--checkpoint-every", "1"});
  REQUIRE_MESSAGE(undisturbed.status == 0, undisturbed.text);
  double limit = since(began); // seconds that a run may live: about as long as a whole one; more where runs get nowhere

  const Arguments command = launched(layout, output, {"--checkpoint-every", "1", "--keep", "2", "--resume"});
  std::mt19937 random(20261129);
  auto folders = [&] {
    std::vector<std::string> names;
    if (std::filesystem::exists(output / "checkpoints"))
      for (const auto& e : std::filesystem::directory_iterator(output / "checkpoints")) names.push_back(e.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  };
  auto newest = [&] {
    std::string newest;
    for (const std::string& n : folders())
      if (!has(n, ".part")) newest = n;
    return newest;
  };
  int killed = 0, launchers = 0, stuck = 0, finished = 0, resumed = 0, parts = 0;
  double slowest = 0;
  auto check_end = [&](const Ended& e) {
    CHECK_MESSAGE(e.status == 0, e.text);
    CHECK(steps_of(output) == steps_of(alone));
    CHECK(weights_of(output / "checkpoints", kSteps) == weights_of(alone / "checkpoints", kSteps));
    ++finished;
  };
  while (killed < kills) {
    const std::string before = newest();
    std::filesystem::create_directories(output);
    std::filesystem::remove(output / "output.txt");
    const auto start = Clock::now();
    Process p(command, output / "output.txt");
    const double life = std::uniform_real_distribution<double>(0, limit)(random);
    while (p.running() && since(start) < life) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    bool hit = false;
    if (const std::vector<pid_t> all = processes_naming(output.string()); !all.empty() && p.running()) {
      const pid_t victim = all[std::uniform_int_distribution<size_t>(0, all.size() - 1)(random)];
      hit = ::kill(victim, SIGKILL) == 0;
      launchers += hit && layout.ranks > 1 && victim == p.pid();
    }
    const auto death = Clock::now();
    while (p.running()) {
      // Open MPI 4.1 misses a rank that dies while it is being started, and waits for ever with nothing of ours left.
      if (hit && since(death) > kSoon && processes_naming(output.string()) == std::vector<pid_t>{p.pid()}) {
        p.signal(SIGKILL);
        ++stuck;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const int status = p.wait();
    CHECK(seconds_until_gone(output.string()) < kSoon);
    const bool wrote = std::filesystem::exists(output / "output.txt"); // not if killed before its first line
    const std::string text = wrote ? read_bytes(output / "output.txt") : "";
    resumed += has(text, "resuming after step");
    CHECK_MESSAGE(!has(text, "trying the one before"), text);
    if (hit && status != 0) {
      slowest = std::max(slowest, since(death));
      ++killed;
      for (const std::string& n : folders()) parts += has(n, ".part");
      if (layout.ranks == 1) CHECK(status == 128 + SIGKILL);
      CHECK_MESSAGE(!has(text, "gdntrain: error"), text);
      if (newest() == before) limit *= 1.2;
      continue;
    }
    check_end({status, text}); // it got to the end: check, then start over
    limit /= 1.2;
    std::filesystem::remove_all(output);
  }
  check_end(run(layout, output, {"--checkpoint-every", "1", "--keep", "2", "--resume"}));
  CHECK(resumed > 0);
  MESSAGE(killed, " kills (", launchers, " of the launcher; ", stuck, " launchers stuck without a rank), ", resumed, " times resumed, ", finished, " runs to the end, ", parts,
          " times a half-written checkpoint lay there; everything was gone after ", slowest, " s at most");
}

} // namespace gdn::test
