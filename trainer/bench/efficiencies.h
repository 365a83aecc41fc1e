#pragma once
#include <string>
#include <vector>

#include "config/hardware.h"
#include "core/dtype.h"
#include "model/provider.h"

// From measured times back to the efficiencies that the cost model (src/cost) turns into times.
namespace gdn::trainer::bench {

// Runs of one op or backward step.
struct Sample {
  model::Work work;
  std::string pass;    // "forward", "backward", "dgrad", "wgrad"
  Seconds seconds = 0; // of one run
  int runs = 1;
};

// Rows of `provider` that make the cost model's total time of the samples of each (family, pass, size) the
// measured one, for all ops of a family and for each (Work::op). Sizes closer than a tenth are one row; at most `most` rows a
// family, op and pass. A sample whose time its bytes explain says nothing about the matrix units and is used only where no other is. At most 1.
std::vector<config::EfficiencyRow> fit_efficiencies(const std::vector<Sample>& samples, const config::Hardware& hardware,
                                                    const std::string& provider, DType dtype, const std::string& source, int most = 12);

// The rows take the place of those of the same provider, family, op and pass.
void replace_efficiencies(config::Hardware& hardware, const std::vector<config::EfficiencyRow>& rows);

// The text of a hardware file with `rows` in it, as replace_efficiencies does to what it says. Keeps all other
// lines, comments too, where every row of the file stands on a line of its own; else the whole is written anew.
std::string with_efficiencies(const std::string& text, const std::string& file, const std::vector<config::EfficiencyRow>& rows);

// Time of a collective over its bytes: seconds = latency + wire / (rate x share).
struct CollectiveSample {
  double wire = 0; // bytes a rank sends, as the cost model counts them
  Seconds seconds = 0;
};
// Latency from the smallest, share from the largest. Throws Error{Usage} for fewer than two.
config::CollectiveRow fit_collective(const std::string& kind, const std::vector<CollectiveSample>& samples, BytesPerSecond rate,
                                     const std::string& source);

} // namespace gdn::trainer::bench
