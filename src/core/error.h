#pragma once
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gdn {

// What went wrong, in the terms that decide the exit status of a program.
enum class ErrorCode {
  Usage, Config, DoesNotFit, NoDevice, Cuda, Nccl, Mpi, Io, Checkpoint, Numeric, Internal, Interrupted
};

// Exit status: 1 failure, 2 usage or configuration, 3 does not fit, 4 no usable device,
// 5 numeric mismatch, 130 interrupted.
int exit_status(ErrorCode code);

// The one exception of this code base. Library code throws it; only `main` turns it into an exit
// status. `message` says what was wrong, where, and what is allowed; `hint` says what to do.
class Error : public std::runtime_error {
public:
  Error(ErrorCode code, std::string message, std::string hint = {});
  ErrorCode code() const { return code_; }
  const std::string& hint() const { return hint_; }

private:
  ErrorCode code_;
  std::string hint_;
};

// The candidate closest to `word` by edit distance (transpositions count one), or empty when none
// is near enough to be a plausible misspelling.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// " did you mean 'x'?" or "" — the tail of every message about an unknown name.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

} // namespace gdn
