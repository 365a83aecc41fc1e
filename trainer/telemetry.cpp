#include "trainer/telemetry.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <fmt/core.h>
#include <nlohmann/json.hpp>
#include <sys/ioctl.h>
#include <unistd.h>

#include "core/error.h"

namespace gdn::trainer {

namespace {

double tokens_per_second(const StepRecord& r) { return static_cast<double>(r.result.tokens) / r.seconds; }

std::string short_count(double n) {
  if (n >= 1e6) return fmt::format("{:.2f}M", n / 1e6);
  if (n >= 1e4) return fmt::format("{:.1f}k", n / 1e3);
  return fmt::format("{:.0f}", n);
}

std::string rate(FlopsPerSecond f) {
  if (f >= 1e12) return fmt::format("{:.0f} TFLOP/s", f / 1e12);
  return fmt::format("{:.2f} GFLOP/s", f / 1e9);
}

} // namespace

std::string step_line(const StepRecord& r) {
  const FlopsPerSecond flops = r.model_flops / r.seconds;
  const std::string mfu = r.device_peak > 0 ? fmt::format("{:.1f}%", 100 * flops / r.device_peak) : "n/a";
  return fmt::format("step {}/{} | loss {:.4f} | norm {:.3g} | lr {:.3g} | {} | {} tok/s | {} | mfu {} | peak {}{}", r.step, r.steps,
                     r.result.loss, r.gradient_norm, r.learning_rate, format_seconds(r.seconds), short_count(tokens_per_second(r)),
                     rate(flops), mfu, format_bytes(r.result.peak.bytes), r.warm_up ? " | warm-up" : "");
}

std::string step_json(const StepRecord& r) {
  nlohmann::ordered_json j;
  j["step"] = r.step;
  j["loss"] = r.result.loss;
  j["aux_loss"] = r.result.aux_loss;
  if (r.result.mtp_loss != 0) j["mtp_loss"] = r.result.mtp_loss;
  j["gradient_norm"] = r.gradient_norm;
  j["learning_rate"] = r.learning_rate;
  j["tokens"] = r.result.tokens;
  j["seconds"] = r.seconds;
  j["forward_backward_seconds"] = r.result.seconds;
  j["tokens_per_second"] = tokens_per_second(r);
  j["model_flops_per_second"] = r.model_flops / r.seconds;
  if (r.device_peak > 0) j["mfu"] = r.model_flops / r.seconds / r.device_peak;
  j["peak_bytes"] = r.result.peak.bytes;
  if (!r.result.expert_load.empty()) j["expert_load"] = r.result.expert_load;
  if (r.warm_up) j["warm_up"] = true;
  return j.dump();
}

bool is_dumb_terminal() {
  const char* term = std::getenv("TERM");
  return term && std::string_view(term) == "dumb";
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0 && !is_dumb_terminal()) {}

void Progress::show(const std::string& line, bool last) {
  if (!terminal_) {
    fmt::print(stderr, "{}\n", line);
    return;
  }
  winsize size{}; // a wrapped line could not be taken back
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  fmt::print(stderr, "\r\x1b[K{}", known && !last ? line.substr(0, size.ws_col - 1) : line);
  open_ = true;
  std::fflush(stderr);
  if (last) finish();
}

void Progress::finish() {
  if (open_) fmt::print(stderr, "\n");
  open_ = false;
}

LineLog::LineLog(const std::filesystem::path& path, bool append) : file_(std::fopen(path.c_str(), append ? "a" : "w")), path_(path.string()) {
  if (!file_) throw Error(ErrorCode::Io, fmt::format("cannot write '{}': {}", path_, std::strerror(errno)));
}

LineLog::~LineLog() { std::fclose(file_); }

void LineLog::write(const std::string& line) {
  if (std::fputs((line + "\n").c_str(), file_) < 0 || std::fflush(file_) != 0)
    throw Error(ErrorCode::Io, fmt::format("cannot write '{}': {}", path_, std::strerror(errno)),
                "make room, then start the same command again; a run goes on with --resume");
}

Quantiles quantiles(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  auto at = [&](double share) { return v[static_cast<size_t>(std::lround(share * static_cast<double>(v.size() - 1)))]; };
  return {at(0.1), at(0.5), at(0.9)};
}

} // namespace gdn::trainer
