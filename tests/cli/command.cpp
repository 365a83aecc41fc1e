#include "command.h"

#include <cstdlib>
#include <stdexcept>

#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

namespace gdn::test {

namespace {

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  if (!value) throw std::runtime_error(std::string(name) + " is not set: run this test through meson");
  return value;
}

} // namespace

std::string gdnplan() { return from_environment("GDNPLAN"); }
std::string source_root() { return from_environment("GDN_SOURCE_ROOT"); }

Result run(const std::vector<std::string>& arguments, const std::vector<std::string>& environment, int columns,
           const std::string& folder) {
  int out[2], err[2];
  if (pipe(err) != 0) throw std::runtime_error("pipe");
  if (columns > 0) {
    winsize size{50, static_cast<unsigned short>(columns), 0, 0};
    if (openpty(&out[0], &out[1], nullptr, nullptr, &size) != 0) throw std::runtime_error("openpty");
  } else if (pipe(out) != 0) {
    throw std::runtime_error("pipe");
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    for (int fd : {out[0], out[1], err[0], err[1]}) close(fd);
    if (!folder.empty() && chdir(folder.c_str()) != 0) _exit(126);
    unsetenv("NO_COLOR");
    unsetenv("COLUMNS");
    for (const std::string& e : environment) putenv(const_cast<char*>(e.c_str()));
    std::vector<char*> argv;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  Result result;
  pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  std::string* texts[2] = {&result.out, &result.err};
  int open = 2;
  while (open > 0 && poll(fds, 2, 30000) > 0) {
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || !fds[i].revents) continue;
      char buffer[65536];
      const ssize_t n = read(fds[i].fd, buffer, sizeof buffer);
      if (n > 0) texts[i]->append(buffer, static_cast<size_t>(n));
      else {
        close(fds[i].fd);
        fds[i].fd = -1;
        --open;
      }
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (columns > 0) std::erase(result.out, '\r');
  return result;
}

} // namespace gdn::test
