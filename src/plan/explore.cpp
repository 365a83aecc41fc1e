#include "plan/explore.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include <fmt/core.h>

#include "core/error.h"
#include "model/spans.h"
#include "model/stack_lists.h"
#include "plan/parallel.h"

namespace gdn::plan {

namespace {

// Every span once: a pair of ops that several layer kinds have acts on all of them.
std::vector<ExploredSpan> candidates(const config::Model& model, const config::Run& run) {
  std::vector<ExploredSpan> out;
  std::set<std::pair<config::LayerKind, config::MlpKind>> kinds;
  std::set<std::tuple<std::string, std::string>> seen;
  for (std::int64_t i = 0; i < model.layers(); ++i) {
    const auto mixer = model.mixers[static_cast<size_t>(i)];
    const auto mlp = model.mlps[static_cast<size_t>(i)];
    if (!kinds.insert({mixer, mlp}).second) continue;
    const model::OpList list = model::decoder_layer(model, run, mixer, mlp);
    for (size_t first = 0; first < list.ops.size(); ++first)
      for (size_t last = first; last < list.ops.size(); ++last) {
        ExploredSpan s;
        s.kind = fmt::format("{}+{}", config::name_of(mixer), config::name_of(mlp));
        s.first = list.ops[first].name;
        s.last = list.ops[last].name;
        if (!seen.insert({s.first, s.last}).second) continue;
        out.push_back(s);
        s.discard = true;
        out.push_back(std::move(s));
      }
  }
  return out;
}

} // namespace

std::string ExploredSpan::text() const {
  if (!module.empty()) return module;
  return (first == last ? first : first + ".." + last) + (discard ? ":discard" : "");
}

Exploration explore(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const ExploreOptions& options) {
  Exploration out;
  const Setting own = Setting::of(run);
  Estimator base(model, run, hardware, options.budget);
  out.base = base.evaluate(own);
  auto measure = [&](Estimator& estimator, const Setting& setting, ExploredSpan& s) {
    const Estimate e = estimator.evaluate(setting);
    s.freed = out.base.peak_bytes - e.peak_bytes;
    const size_t rank = static_cast<size_t>(out.base.worst);
    s.retained = out.base.ranks[rank].retained_per_micro_batch - e.ranks[rank].retained_per_micro_batch;
    s.replay = e.recompute_seconds - out.base.recompute_seconds;
  };

  std::vector<ExploredSpan> all = candidates(model, run);
  std::vector<char> possible(all.size(), 0);
  constexpr size_t kBlock = 64; // spans an estimator traces before its memory is given back
  const size_t blocks = (all.size() + kBlock - 1) / kBlock;
  std::atomic<size_t> done = 0;
  std::mutex reporting;
  for_each_parallel(blocks, [&](size_t b, size_t) {
    Estimator estimator(model, run, hardware, options.budget);
    for (size_t i = b * kBlock; i < std::min(all.size(), (b + 1) * kBlock); ++i) {
      Setting setting = own;
      setting.granularity = config::Granularity::Selective;
      setting.user_spans.push_back({"span", all[i].first, all[i].last, all[i].discard});
      try {
        measure(estimator, setting, all[i]);
        possible[i] = 1;
      } catch (const Error& e) { // drops the layer's output, overlaps a module, or nothing can hook it
        if (e.code() != ErrorCode::Config) throw;
      }
    }
    const size_t finished = ++done;
    if (options.progress) {
      std::lock_guard lock(reporting);
      options.progress(static_cast<double>(finished) / static_cast<double>(blocks), "spans");
    }
  });
  out.tried = static_cast<std::int64_t>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    if (!possible[i]) ++out.impossible;
    else if (all[i].freed > 0) out.spans.push_back(std::move(all[i]));
  }
  std::stable_sort(out.spans.begin(), out.spans.end(), [](const ExploredSpan& a, const ExploredSpan& b) { return a.value() > b.value(); });

  for (const Setting& s : legal_settings(base.workload(), false)) {
    if (s.granularity != config::Granularity::Selective || s.modules.size() != 1) continue;
    if (std::find(own.modules.begin(), own.modules.end(), s.modules[0]) != own.modules.end()) continue;
    Setting more = own;
    more.granularity = config::Granularity::Selective;
    more.modules.push_back(s.modules[0]);
    ExploredSpan m;
    m.module = s.modules[0];
    try {
      measure(base, more, m);
      out.modules.push_back(std::move(m));
    } catch (const Error& e) { // overlaps one of the run's own
      if (e.code() != ErrorCode::Config) throw;
    }
  }
  std::stable_sort(out.modules.begin(), out.modules.end(), [](const ExploredSpan& a, const ExploredSpan& b) { return a.value() > b.value(); });

  // From no replay on, always the span that frees most for each further millisecond.
  const ExploredSpan* last = nullptr;
  while (true) {
    const ExploredSpan* next = nullptr;
    auto slope = [&](const ExploredSpan& s) {
      const Seconds more = s.replay - (last ? last->replay : 0);
      return static_cast<double>(s.freed - (last ? last->freed : 0)) / std::max(more, 1e-9);
    };
    for (const ExploredSpan& s : out.spans)
      if ((!last || (s.freed > last->freed && s.replay > last->replay)) &&
          (!next || slope(s) > slope(*next) || (slope(s) == slope(*next) && s.freed > next->freed)))
        next = &s;
    if (!next) break;
    out.front.push_back(*next);
    last = next;
  }
  out.assumptions = base.assumptions();
  return out;
}

} // namespace gdn::plan
