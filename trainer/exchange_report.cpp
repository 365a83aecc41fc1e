#include "trainer/exchange_report.h"

#include <map>
#include <optional>

#include <fmt/core.h>

#include "config/profiles.h"
#include "core/error.h"
#include "cost/cost.h"

namespace gdn::trainer {

namespace {

struct Total {
  std::int64_t count = 0;
  Bytes bytes = 0;
  Seconds measured = 0, predicted = 0;
};
using Totals = std::map<std::pair<std::string, int>, Total>;

// `cost` may be null.
Totals totals_of(const std::vector<TimedExchange>& exchanges, const cost::CostModel* cost) {
  Totals totals;
  for (const TimedExchange& x : exchanges) {
    if (x.ranks == 1) continue; // a copy
    Total& t = totals[{x.kind, x.ranks}];
    ++t.count;
    t.bytes += x.bytes;
    t.measured += x.seconds;
    // Ranks of a group are neighbours: of the tightest one.
    if (cost) t.predicted += cost->seconds(model::Collective{collective_kind(x.kind), model::Group::Tp, x.ranks, x.bytes});
  }
  return totals;
}

} // namespace

model::CollectiveKind collective_kind(const std::string& name) {
  using enum model::CollectiveKind;
  for (model::CollectiveKind kind : {AllReduce, AllGather, ReduceScatter, AllToAll, P2p})
    if (model::name_of(kind) == name) return kind;
  throw Error(ErrorCode::Internal, fmt::format("'{}' is no kind of collective", name));
}

void add_exchange_rows(config::ProfileSet& set, const std::vector<TimedExchange>& exchanges) {
  for (const auto& [key, t] : totals_of(exchanges, nullptr)) {
    const std::string name = fmt::format("collectives.{}.{}", key.first, key.second);
    set.rows.push_back({name + ".count", static_cast<double>(t.count), "exchanges", "counted"});
    set.rows.push_back({name + ".bytes", static_cast<double>(t.bytes), "bytes", "counted"});
    set.rows.push_back({name + ".seconds", t.measured, "seconds", "measured"});
  }
}

void add_exchanges(report::Document& d, const Setup& s, const Device& device, const std::vector<TimedExchange>& exchanges) {
  const config::Hardware hardware = config::Profiles().hardware(s.profile.hardware);
  std::optional<cost::CostModel> cost;
  if (hardware.device_name == device.name()) cost.emplace(hardware, std::string(device.provider().name()), s.profile.run.parallel, s.profile.run.dtype);
  const Totals totals = totals_of(exchanges, cost ? &*cost : nullptr);
  if (totals.empty()) return;
  using report::Align;
  d.heading("Exchanges of the last step, rank 0");
  report::Table t{"exchanges", {{"kind"}, {"ranks", Align::Right}, {"count", Align::Right}, {"bytes", Align::Right}, {"measured", Align::Right}, {"predicted", Align::Right}}};
  for (const auto& [key, x] : totals)
    t.rows.push_back({key.first, fmt::format("{}", key.second), fmt::format("{}", x.count), format_bytes(x.bytes), format_seconds(x.measured),
                      cost ? format_seconds(x.predicted) : "unknown"});
  d.table(std::move(t));
  d.line("Measured times include waiting for the other ranks; the step ran op by op, each timed.");
}

} // namespace gdn::trainer
