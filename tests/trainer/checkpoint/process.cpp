#include "process.h"

#include <algorithm>
#include <charconv>
#include <fstream>

namespace gdn::test {

std::vector<pid_t> processes_naming(const std::string& text) {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (const std::filesystem::directory_entry& e : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = e.path().filename().string();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ptr != name.data() + name.size()) continue;
    std::ifstream in(e.path() / "cmdline", std::ios::binary);
    std::string line; // empty when it ended meanwhile
    std::getline(in, line);
    if (line.find(text) != std::string::npos) found.push_back(pid);
  }
  std::sort(found.begin(), found.end());
  return found;
}

} // namespace gdn::test
