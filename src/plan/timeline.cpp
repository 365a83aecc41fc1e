#include "plan/timeline.h"

#include <algorithm>
#include <map>

#include "program/program.h"

namespace gdn::plan {

using program::Pass;

namespace {

std::vector<Seconds> durations(const program::UnitTrace& t, const cost::CostModel& cost, const model::Provider& provider) {
  std::vector<Seconds> out;
  for (const program::Event& e : t.events) out.push_back(cost.seconds(t, e, provider));
  return out;
}

} // namespace

Timeline timeline(Estimator& estimator, const Estimate& estimate, const config::Model& model, const config::Run& run, int columns) {
  const config::Parallel& p = run.parallel;
  const RankEstimate& worst = estimate.worst_rank();
  const int pp = static_cast<int>(p.pp), vp = static_cast<int>(p.vp);
  const int micro_batches = program::steady_micro_batches(pp, vp, static_cast<int>(run.micro_batches()), 0, forwards_ahead(run));
  std::vector<program::UnitInstance> units;
  const std::vector<model::Chunk> chunks = model::chunks_of_rank(model.layers(), p, worst.rank);
  for (size_t c = 0; c < chunks.size(); ++c)
    for (const PlacedUnit& u : estimator.workload().units(chunks[c], estimate.setting))
      units.push_back({u.unit->list, &u.unit->spans, &u.unit->trace, static_cast<int>(c)});
  const program::Program flat(std::move(units), program::one_f_one_b(pp, static_cast<int>(worst.rank), vp, micro_batches, 0, forwards_ahead(run)), micro_batches);

  std::map<const program::UnitTrace*, std::vector<Seconds>> known;
  auto seconds = [&](const program::Program::Run& r) {
    const program::UnitTrace* t = flat.units()[static_cast<size_t>(r.unit)].trace;
    auto [it, fresh] = known.try_emplace(t);
    if (fresh) it->second = durations(*t, estimator.cost(), estimator.workload().provider());
    return it->second[static_cast<size_t>(r.event)];
  };

  Timeline out;
  out.rank = worst.rank;
  const program::Program::Run* fullest = nullptr;
  for (const program::Program::Run& r : flat.runs()) {
    const program::UnitInstance& u = flat.units()[static_cast<size_t>(r.unit)];
    const Pass pass = u.trace->events[static_cast<size_t>(r.event)].pass;
    const Seconds from = out.end;
    out.end += seconds(r);
    if (!out.passes.empty() && out.passes.back().pass == pass && out.passes.back().chunk == u.chunk && out.passes.back().micro_batch == r.micro_batch)
      out.passes.back().to = out.end;
    else out.passes.push_back({from, out.end, pass, u.chunk, r.micro_batch});
    if (!fullest || r.level > fullest->level) fullest = &r;
  }
  if (!fullest) return out;
  // What stays for the whole run is the difference between the estimate's peak and the program's.
  const CategoryBytes still = worst.peak.by - fullest->by;
  out.levels.assign(static_cast<size_t>(columns), {});
  std::vector<Bytes> seen(out.levels.size(), -1);
  Seconds at = 0;
  for (const program::Program::Run& r : flat.runs()) {
    const Seconds to = at + seconds(r);
    auto column = [&](Seconds t) { return std::clamp(static_cast<int>(t / out.end * columns), 0, columns - 1); };
    for (int c = column(at); c <= column(to); ++c)
      if (Bytes& most = seen[static_cast<size_t>(c)]; r.level > most) {
        most = r.level;
        out.levels[static_cast<size_t>(c)] = r.by + still;
        if (&r == fullest) out.peak = c;
      }
    at = to;
  }
  return out;
}

} // namespace gdn::plan
