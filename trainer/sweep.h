#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trainer/data.h"
#include "trainer/prediction.h"
#include "trainer/setup.h"
#include "trainer/time_prediction.h"

namespace gdn::trainer {

// Every legal recompute setting, measured on one session: weights, optimizer state and data stay on the
// device, settings whose programs are equal run once.
struct SweepRow {
  std::string setting;
  std::string same_as = {};    // the setting that ran in its place; empty: it ran itself
  Bytes predicted_peak = 0, measured_peak = 0, arena = 0;
  Bytes predicted_process = 0, measured_process = 0; // all that the process takes of the device's memory; 0: unknown
  CategoryBytes at_peak = {};  // measured
  Seconds predicted_seconds = 0, measured_seconds = 0; // forward and backward of a step, the fastest run
  Seconds median_seconds = 0, slowest_seconds = 0;     // of the timed runs
  kernels::Fingerprint results = {}; // of the loss and of every gradient, bit by bit
  bool identical = true;       // that is the one without recompute
  std::string differs = {};    // the first result that is not

  double spread() const { return median_seconds > 0 ? (slowest_seconds - measured_seconds) / median_seconds : 0; }
  bool planned = false;        // the predicted time is the planner's; else it starts from the one measured without recompute
  bool resumed = false;        // read from an earlier sweep's file
};

struct SweepOptions {
  std::int64_t repeats = 3;    // timed runs of a setting, after one with poisoned memory and guard bands, and on a GPU two more
  bool hypothetical = false;   // also forms that no revision has
  std::string command = "sweep", versions = {}; // of the program, for the file
};

class Sweep {
public:
  Sweep(Session& session, const Setup& setup, const Tokens& tokens, SweepOptions options);

  // Runs what `file` does not hold yet, few modules first, and appends each setting to it when it is done. `tell`
  // gets each finished row; `stop` ends the sweep early. A setting that does not fit is left out. Throws
  // Error{Config} when the file belongs to another configuration, or was cut short.
  std::vector<SweepRow> run(const std::filesystem::path& file, const std::function<void(const SweepRow&, size_t, size_t)>& tell,
                            const std::function<bool()>& stop);
  Seconds baseline_seconds() const { return baseline_seconds_; } // without recompute, timed now
  const std::vector<std::string>& too_large() const { return too_large_; } // settings left out

private:
  void measure(SweepRow& row, const plan::Setting& setting, bool baseline);
  void note_results(SweepRow& row, double loss, bool baseline);
  Seconds replay_seconds(const program::Program& program) const;
  config::Profile identity() const;

  Session& session_;
  const Setup& setup_;
  const Tokens& tokens_;
  SweepOptions options_;
  TimePrediction time_;
  std::map<std::string, Seconds> forward_seconds_; // of a forward op by name, without recompute
  Seconds baseline_seconds_ = 0;
  std::vector<kernels::Fingerprint> baseline_results_; // the loss, then every gradient
  std::vector<std::string> too_large_;
};

// The rows of a sweep's file beside what is predicted now, by the profiles that this program has: nothing runs.
// Throws Error{Config} when the file is of another model or stack, or no sweep.
std::vector<SweepRow> predict_again(const Setup& setup, const config::Profile& measured);

// How well rows were predicted; settings that did not run themselves are left out.
struct SweepAgreement {
  std::int64_t settings = 0, exact_peaks = 0, identical = 0;
  std::int64_t processes = 0, processes_within = 0; // whole-process memory: known, within 1 %
  double process_mean = 0, process_worst = 0;       // relative; worst with its sign, predicted over measured
  double time_mean = 0, time_worst = 0, time_bias = 0; // of the median step
  std::int64_t pairs = 0, ordered = 0;              // medians more than kApart apart: in the predicted order
  std::int64_t overlapping = 0;                     // of those not in order: timed runs of both overlap
  static constexpr double kApart = 0.03;
};
SweepAgreement agreement_of(const std::vector<SweepRow>& rows);

// Two programs with equal signatures run the same ops on the same bytes in the same order.
std::string signature(const program::Program& program);

} // namespace gdn::trainer
