#include "core/error.h"

#include <algorithm>
#include <utility>

namespace gdn {

int exit_status(ErrorCode code) {
  switch (code) {
  case ErrorCode::Usage:
  case ErrorCode::Config: return 2;
  case ErrorCode::DoesNotFit: return 3;
  case ErrorCode::NoDevice: return 4;
  case ErrorCode::Numeric: return 5;
  case ErrorCode::Interrupted: return 130;
  case ErrorCode::Cuda:
  case ErrorCode::Nccl:
  case ErrorCode::Mpi:
  case ErrorCode::Io:
  case ErrorCode::Checkpoint:
  case ErrorCode::Internal: return 1;
  }
  return 1;
}

Error::Error(ErrorCode code, std::string message, std::string hint)
    : std::runtime_error(std::move(message)), code_(code), hint_(std::move(hint)) {}

namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t cost = a[i - 1] == b[j - 1] ? 0 : 1;
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + cost});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

} // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& c : candidates) {
    size_t d = edit_distance(word, c);
    if (d < best_distance) {
      best_distance = d;
      best = c;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best = nearest(word, candidates);
  return best.empty() ? "" : "; did you mean '" + best + "'?";
}

} // namespace gdn
