#pragma once
#include <string>
#include <vector>

#include "config/hardware.h"
#include "trainer/bench/efficiencies.h"
#include "trainer/device.h"

// Exchanges between the ranks of a run, and the rows of a hardware profile that describe them.
namespace gdn::trainer::bench {

struct CollectiveTime {
  std::string kind;    // as in hardware profiles
  Bytes bytes = 0;     // as model::Collective counts them
  double wire = 0;     // bytes a rank sends, as the cost model counts them
  Seconds seconds = 0; // median over repeats, of the rank that came last: without waiting for others; launches covered
};

// Every kind over all ranks, from 64 KiB to 256 MiB, `repeats` times each. All ranks together; `world` is
// Device::connect's. Messages (p2p) go from rank 0 to rank 1.
std::vector<CollectiveTime> time_collectives(World& world, Device& device, int repeats);

// A row of `provider` for each kind on `link` ("scale_up", "network"): its latency and its share of the profile's rate of
// the link. Throws Error{Usage} where the profile has none.
std::vector<config::CollectiveRow> fit_collectives(const std::vector<CollectiveTime>& times, const config::Hardware& hardware, const std::string& provider,
                                                   const std::string& source, const std::string& link = "scale_up");

// The rows take the place of those of the same provider, kind and link.
void replace_collectives(config::Hardware& hardware, const std::vector<config::CollectiveRow>& rows);

// The text of a hardware file with `rows` in it, its other lines kept as by with_efficiencies.
std::string with_collectives(const std::string& text, const std::string& file, const std::vector<config::CollectiveRow>& rows);

} // namespace gdn::trainer::bench
