#pragma once
#include <chrono>
#include <string>

namespace gdn::planner {

// One refreshing line on stderr while something takes long; silent where stderr is no terminal.
class Progress {
public:
  Progress();
  ~Progress(); // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void operator()(double share, const char* what);

private:
  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_ = {};
};

} // namespace gdn::planner
