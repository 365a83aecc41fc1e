#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

// Whole-process cost of gdnplan: median CPU time and peak memory beside the limits; fails over one.
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

struct Bar {
  const char* name;
  std::vector<std::string> arguments;
  double limit; // ms of CPU time
  int runs;
};

} // namespace

int main() {
  const char* gdnplan = std::getenv("GDNPLAN");
  if (!gdnplan) return 2;
  // 94 layers in 32 virtual stages, 64 micro-batches a pipeline.
  std::string layout = "[2";
  for (int i = 0; i < 30; ++i) layout += ", 3";
  layout += ", 2]";
  const std::vector<Bar> bars{
      {"plan, 397B", {"plan", "qwen3.5-397b-a17b"}, 100, 21},
      {"estimate, 397B", {"estimate", "qwen3.5-397b-a17b"}, 20, 21},
      {"estimate, 94 layers, pp 8 x vp 4, 64 micro-batches",
       {"estimate", "qwen3.5-397b-a17b", "--set", "num_hidden_layers=94", "--pp", "8", "--vp", "4", "--gpus", "64", "--ep", "8", "--mbs", "1",
        "--gbs", "512", "--set", "pipeline_model_parallel_layout=" + layout, "--budget", "100TiB"}, 50, 21},
      {"search, 35B on 16 GPUs, 1.1 million candidates", // 10 s on two cores
       {"search", "qwen3.5-35b-a3b", "--gpus", "16", "--global-batch", "256"}, 20000, 1}};
  bool slow = false;
  for (const Bar& bar : bars) {
    std::vector<std::string> command{gdnplan};
    command.insert(command.end(), bar.arguments.begin(), bar.arguments.end());
    std::vector<Cost> costs;
    for (int i = 0; i < bar.runs; ++i) costs.push_back(run(command));
    std::sort(costs.begin(), costs.end(), [](const Cost& a, const Cost& b) { return a.milliseconds < b.milliseconds; });
    const Cost& median = costs[costs.size() / 2];
    slow = slow || median.milliseconds > bar.limit;
    std::printf("%-52s median %8.1f ms of CPU (limit %.0f, ratio %.2f), %.1f MiB\n", bar.name, median.milliseconds, bar.limit,
                median.milliseconds / bar.limit, static_cast<double>(median.kib) / 1024);
  }
  return slow ? 1 : 0;
}
