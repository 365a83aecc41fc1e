#pragma once
#include <vector>

#include "report/document.h"
#include "trainer/comm/communicator.h"
#include "trainer/setup.h"

// Exchanges of a step, by kind and number of ranks: bytes, and time beside the cost model's.
namespace gdn::trainer {

// By its name in hardware profiles. Throws Error{Internal} for any other.
model::CollectiveKind collective_kind(const std::string& name);

// collectives.KIND.RANKS.{count, bytes, seconds}.
void add_exchange_rows(config::ProfileSet& set, const std::vector<TimedExchange>& exchanges);
// A table; nothing without exchanges. Predicted times are of the setup's hardware profile, if it is of this device.
void add_exchanges(report::Document& d, const Setup& setup, const Device& device, const std::vector<TimedExchange>& exchanges);

} // namespace gdn::trainer
