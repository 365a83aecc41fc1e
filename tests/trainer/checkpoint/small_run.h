#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "process.h"
#include "tests/temporary_folder.h"

// gdntrain run on a model so small that a step takes milliseconds, for tests that stop and resume it.
namespace gdn::test {

using Arguments = std::vector<std::string>;

inline constexpr int kSteps = 12; // unless --steps is given

std::string environment(const char* name); // must be set

// Keys and values as --set options.
Arguments sets(const std::vector<std::string>& settings);

Arguments joined(Arguments a, const Arguments& b);

Arguments small_run(const std::filesystem::path& output, const Arguments& more = {});

// How many ranks do it, and what each does.
struct Layout {
  int ranks = 1;
  std::vector<std::string> settings = {};
};

// The command of `layout`; several ranks under mpirun, more than there are cores if need be.
Arguments launched(const Layout& layout, const std::filesystem::path& output, const Arguments& more = {});

struct Ended {
  int status = 0;
  std::string text = {};
};

Ended finish(const Arguments& command, const std::filesystem::path& output, rlim_t file_size = 0);
Ended run(const Layout& layout, const std::filesystem::path& output, const Arguments& more = {});
Ended run(const std::filesystem::path& output, const Arguments& more = {}, rlim_t file_size = 0);

// Everything of each step that is no time: exact text of loss, gradient norm and the rest.
std::map<int, std::string> steps_of(const std::filesystem::path& output);
double loss_of(const std::string& step);

std::filesystem::path checkpoint_of(const std::filesystem::path& checkpoints, int step);

// Bytes of the file of each rank.
std::map<std::string, std::string> weights_of(const std::filesystem::path& checkpoints, int step);

// Wherever lines are broken.
bool has(std::string text, const std::string& part);

int count(const std::filesystem::path& folder);

// Until so many steps are logged (checkpoints of those before the last are written then), or the program has ended.
void wait_for_step(Process& p, const std::filesystem::path& output, int steps = 1);

// Seconds in which survivors must be gone: they take two (Open MPI notices a lost launcher), more on a busy machine.
inline constexpr double kSoon = 20;

// Seconds until nothing that names `text` runs any more; at most `limit`.
double seconds_until_gone(const std::string& text, double limit = 30);

} // namespace gdn::test
