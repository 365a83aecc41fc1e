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

namespace gdn::trainer {

// Every legal recompute setting, measured on one session: weights stay, settings whose programs are
// equal run once.
struct SweepRow {
  std::string setting;
  std::string same_as = {};    // the setting that ran in its place; empty: it ran itself
  Bytes predicted_peak = 0, measured_peak = 0, arena = 0;
  CategoryBytes at_peak = {};  // measured
  Seconds predicted_seconds = 0, measured_seconds = 0; // forward and backward of a step, the fastest run
  Seconds median_seconds = 0, slowest_seconds = 0;     // of the timed runs
  std::uint64_t results = 0;   // hash of the loss and of every gradient, bit by bit
  bool identical = true;       // that hash is the one without recompute

  double spread() const { return median_seconds > 0 ? (slowest_seconds - measured_seconds) / median_seconds : 0; }
  bool resumed = false;        // read from an earlier sweep's file
};

struct SweepOptions {
  std::int64_t repeats = 3;    // timed runs of a setting, after one warm-up
  bool hypothetical = false;   // also forms that no revision has
};

class Sweep {
public:
  Sweep(Session& session, const Setup& setup, const Tokens& tokens, SweepOptions options);

  // Runs what `file` does not hold yet and appends each setting to it when it is done. `tell` gets each
  // finished row; `stop` ends the sweep early. Throws Error{Config} when the file belongs to another
  // configuration, or was cut short.
  std::vector<SweepRow> run(const std::filesystem::path& file, const std::function<void(const SweepRow&, size_t, size_t)>& tell,
                            const std::function<bool()>& stop);
  Seconds baseline_seconds() const { return baseline_seconds_; } // without recompute, timed now

private:
  void measure(SweepRow& row, const plan::Setting& setting, bool baseline);
  Seconds replay_seconds(const program::Program& program) const;
  config::Profile to_profile(const SweepRow& row) const;
  config::Profile read(const std::filesystem::path& file) const;
  void append(const std::filesystem::path& file, const SweepRow& row, bool first) const;

  Session& session_;
  const Setup& setup_;
  const Tokens& tokens_;
  SweepOptions options_;
  std::map<std::string, Seconds> forward_seconds_; // of a forward op by name, without recompute
  Seconds baseline_seconds_ = 0;
  std::uint64_t baseline_results_ = 0;
};

// Two programs with equal signatures run the same ops on the same bytes in the same order.
std::string signature(const program::Program& program);

// Share of pairs that both columns order alike; pairs equal in `predicted` are left out. 1 without pairs.
double rank_agreement(const std::vector<double>& predicted, const std::vector<double>& measured);

} // namespace gdn::trainer
