#pragma once
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "trainer/session.h"

namespace gdn::trainer {

// What is known about one finished step.
struct StepRecord {
  std::int64_t step = 0, steps = 0;  // from 1
  StepResult result;
  double gradient_norm = 0, learning_rate = 0;
  Seconds seconds = 0;               // data, forward, backward and update
  Flops model_flops = 0;             // of the step, forward and backward; a rank's share
  FlopsPerSecond device_peak = 0;    // dense; 0: unknown
  bool warm_up = false;              // left out of averages
};

// step 12/100 | loss 3.28 | norm 4.3 | lr 6e-4 | 412 ms | 158.9k tok/s | 512 TFLOP/s | mfu 51.8% | peak 71.2 GiB
std::string step_line(const StepRecord& record);
std::string step_json(const StepRecord& record); // one JSON object, no line end

bool is_dumb_terminal(); // TERM=dumb: it can neither move its cursor nor show colour

// Steps on stderr: one refreshing line on a terminal that can, cut to its width; plain lines otherwise.
class Progress {
public:
  Progress();
  ~Progress() { finish(); } // an error message begins on a line of its own
  Progress(const Progress&) = delete;
  void show(const std::string& line, bool last);
  void finish(); // ends a refreshing line

private:
  bool terminal_;
  bool open_ = false;
};

// Appends lines to a file and keeps each whole: written and flushed line by line.
class LineLog {
public:
  LineLog(const std::filesystem::path& path, bool append); // throws Error{Io}
  ~LineLog();
  LineLog(const LineLog&) = delete;
  void write(const std::string& line);

private:
  std::FILE* file_;
  std::string path_;
};

struct Quantiles {
  double p10 = 0, median = 0, p90 = 0;
};
Quantiles quantiles(std::vector<double> values); // of at least one value

} // namespace gdn::trainer
