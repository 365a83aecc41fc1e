#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

// Whole-process cost of gdnplan on the 397B model: median CPU time and peak memory of 21 runs beside
// the limits (plan 100 ms and 64 MiB, estimate 20 ms).
namespace {

struct Cost {
  double milliseconds;
  long kib;
};

Cost run(const std::vector<std::string>& arguments) {
  const pid_t child = fork();
  if (child == 0) {
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    std::vector<char*> argv;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  rusage usage{};
  wait4(child, &status, 0, &usage);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) std::exit(1);
  auto ms = [](const timeval& t) { return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_usec) / 1e3; };
  return {ms(usage.ru_utime) + ms(usage.ru_stime), usage.ru_maxrss};
}

} // namespace

int main() {
  const char* gdnplan = std::getenv("GDNPLAN");
  if (!gdnplan) return 2;
  for (const char* command : {"plan", "estimate"}) {
    std::vector<Cost> costs;
    for (int i = 0; i < 21; ++i) costs.push_back(run({gdnplan, command, "qwen3.5-397b-a17b"}));
    std::sort(costs.begin(), costs.end(), [](const Cost& a, const Cost& b) { return a.milliseconds < b.milliseconds; });
    const double limit = std::string(command) == "plan" ? 100 : 20;
    std::printf("%-8s qwen3.5-397b-a17b: median %.1f ms of CPU (limit %.0f, ratio %.2f), %.1f MiB\n", command, costs[10].milliseconds, limit,
                costs[10].milliseconds / limit, static_cast<double>(costs[10].kib) / 1024);
  }
}
