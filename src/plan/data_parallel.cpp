#include "plan/data_parallel.h"

#include <algorithm>

namespace gdn::plan {

using model::CollectiveKind;
using model::Group;

namespace {

struct ParameterBuffer { // of dense or of expert parameters
  Group group;
  std::int64_t ranks;
  model::StateBytes bytes;
  std::int64_t UnitState::*elements;
};

// Seconds of what unit i completes; `forward`: the first unit of a bucket waits for it, else the last one sends it.
// `least`: elements that close a bucket of the first chunk, 0 where that chunk too is one bucket.
void add_buckets(std::vector<Seconds>& transfers, const cost::CostModel& cost, const std::vector<UnitState>& units, const ParameterBuffer& b,
                 CollectiveKind kind, Bytes bytes, std::int64_t least, bool forward) {
  std::int64_t all = 0;
  for (const UnitState& u : units) all += u.*b.elements;
  if (all == 0 || bytes == 0 || b.ranks <= 1) return;
  std::int64_t filled = 0;
  for (size_t i = units.size(); i-- > 0;) {
    filled += units[i].*b.elements;
    const bool whole = i == 0 || units[i - 1].chunk != units[i].chunk; // the chunk's last gradient
    const std::int64_t full = least > 0 && units[i].chunk == 0 ? filled / least : 0;
    if (filled == 0 || (full == 0 && !whole)) continue;
    const std::int64_t buckets = std::max<std::int64_t>(1, full);
    const double share = static_cast<double>(filled) / static_cast<double>(all) / static_cast<double>(buckets);
    const auto size = static_cast<Bytes>(share * static_cast<double>(bytes));
    transfers[forward ? i : units.size() - 1 - i] += static_cast<double>(buckets) * cost.seconds(model::Collective{kind, b.group, b.ranks, size});
    filled = 0;
  }
}

} // namespace

DataParallelTime data_parallel_time(const cost::CostModel& cost, const config::Run& run, const model::StaticState& state,
                                    std::int64_t rank, const std::vector<UnitState>& units) {
  const config::Parallel& p = run.parallel;
  const ParameterBuffer buffers[] = {{Group::Dp, p.dp() * p.cp, state.dense, &UnitState::dense}, {Group::Edp, p.edp(), state.expert, &UnitState::expert}};
  const CollectiveKind reduction = run.optimizer.distributed ? CollectiveKind::ReduceScatter : CollectiveKind::AllReduce;
  const std::int64_t least = rank > 0 ? 0 : std::max<std::int64_t>(40'000'000, 1'000'000 * p.dp() * p.cp);
  std::vector<Seconds> reduced(units.size()), gathered(units.size()), backward, forward;
  DataParallelTime out;
  for (const ParameterBuffer& b : buffers) {
    if (run.overlap.gradients) add_buckets(reduced, cost, units, b, reduction, b.bytes.gradients, least, false);
    else out.reduced += cost.seconds(model::Collective{reduction, b.group, b.ranks, b.bytes.gradients});
    if (!run.optimizer.distributed) continue;
    if (run.overlap.parameters) add_buckets(gathered, cost, units, b, CollectiveKind::AllGather, b.bytes.parameters, least, true);
    else out.gathered += cost.seconds(model::Collective{CollectiveKind::AllGather, b.group, b.ranks, b.bytes.parameters});
  }
  for (size_t i = 0; i < units.size(); ++i) {
    backward.push_back(units[units.size() - 1 - i].backward);
    forward.push_back(units[i].forward);
  }
  out.reduced += cost::left_behind(backward, reduced);
  out.gathered += cost::waited_for(forward, gathered);
  return out;
}

} // namespace gdn::plan
