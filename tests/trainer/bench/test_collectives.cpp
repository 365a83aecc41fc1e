// Rows of a hardware profile from measured exchanges.
#include <algorithm>

#include <doctest/doctest.h>

#include "core/error.h"
#include "cost/cost.h"
#include "trainer/bench/collective_times.h"
#include "trainer/exchange_report.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::bench;

namespace {

config::Hardware linked_machine() {
  config::Hardware h;
  h.name = "machine";
  h.scale_up = 400e9;
  h.collectives = {{"all_to_all", "scale_up", 0.5, 1e-6, "old"}, {"all_to_all", "network", 0.5, 1e-6, "old"}, {"p2p", "scale_up", 0.9, 1e-6, "old"}};
  return h;
}

} // namespace

// Of 200 GB/s behind 10 us: 64 KiB between two ranks sends 32 KiB in 0.16 us, 256 MiB 128 MiB in 671 us.
TEST_CASE("rows fitted to exchanges give their times back") {
  std::vector<CollectiveTime> times;
  for (Bytes bytes : {Bytes{64} << 10, Bytes{4} << 20, Bytes{256} << 20}) {
    const double wire = static_cast<double>(bytes) / 2;
    times.push_back({"all_to_all", bytes, wire, 10e-6 + wire / 200e9});
    times.push_back({"all_reduce", bytes, 2 * wire, 20e-6 + 2 * wire / 100e9});
  }
  std::stable_sort(times.begin(), times.end(), [](const CollectiveTime& a, const CollectiveTime& b) { return a.kind < b.kind; });
  config::Hardware h = linked_machine();
  const auto rows = fit_collectives(times, h, "own", "measured");
  REQUIRE(rows.size() == 2);
  replace_collectives(h, rows);
  CHECK(h.collectives.size() == 5); // anyone's stay beside those of the provider
  const cost::CostModel cost(h, "own", {}, DType::BF16);
  for (const CollectiveTime& t : times)
    CHECK(cost.seconds(model::Collective{collective_kind(t.kind), model::Group::Tp, 2, t.bytes}) == doctest::Approx(t.seconds).epsilon(0.002).scale(0));
  CHECK(cost.seconds(model::Collective{collective_kind("all_to_all"), model::Group::Tp, 2, Bytes{256} << 20}) == doctest::Approx(681.1e-6).epsilon(0.002).scale(0));
}

TEST_CASE("a collective of no known kind is refused") { CHECK_THROWS_AS(collective_kind("broadcast"), Error); }
