#pragma once
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace gdn::test {

// A program that runs beside the test. stdout and stderr go to a file.
class Process {
public:
  // `file_size`: the largest file it may write, bytes; 0: no limit.
  Process(const std::vector<std::string>& arguments, const std::filesystem::path& output, rlim_t file_size = 0) {
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ > 0) return;
    const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    ::dup2(out, 1);
    ::dup2(out, 2);
    if (file_size > 0) {
      const rlimit limit{file_size, file_size};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    std::vector<char*> argv;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  Process(const Process&) = delete;
  ~Process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }

  void signal(int number) { ::kill(pid_, number); }
  // Exit status; 128 + signal when it was killed by one.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  bool running() {
    siginfo_t info = {};
    return pid_ > 0 && ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
  }
  pid_t pid() const { return pid_; }

private:
  pid_t pid_ = -1;
};

// All processes whose command line names `text`, such as the folder of one test: a launcher and its ranks.
// One that ended but was not waited for has no command line.
std::vector<pid_t> processes_naming(const std::string& text);

} // namespace gdn::test
