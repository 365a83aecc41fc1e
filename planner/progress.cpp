#include "planner/progress.h"

#include <unistd.h>

#include <fmt/core.h>

namespace gdn::planner {

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::operator()(double share, const char* what) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || now - last_ < std::chrono::milliseconds(50)) return;
  last_ = now;
  shown_ = true;
  constexpr int kWidth = 30;
  const int done = static_cast<int>(share * kWidth);
  std::string bar;
  for (int i = 0; i < kWidth; ++i) bar += i < done ? '#' : '.';
  fmt::print(stderr, "\r\x1b[K[{}] {:3.0f} % {}", bar, share * 100, what);
  std::fflush(stderr);
}

} // namespace gdn::planner
