#include "plan/search.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "core/error.h"
#include "kernels/describe/own.h"
#include "model/spans.h"
#include "model/stack_lists.h"
#include "model/validate.h"
#include "plan/bound.h"
#include "plan/halves.h"
#include "plan/parallel.h"
#include "plan/trace_templates.h"

namespace gdn::plan {

using config::Granularity;
using model::OpList;
using model::Span;

namespace {

// What decides which ops a layer has, hence which modules act: whether each size is more than one.
int ops_class(const config::Run& r) {
  const config::Parallel& p = r.parallel;
  return (p.tp > 1) | (p.cp > 1) << 1 | (p.ep > 1) << 2 | (p.etp > 1) << 3;
}

// Recompute settings of a search with the modules each lists as bits. The stack's rules on recompute and
// on parallelism are separate ones: a setting is legal wherever its modules act.
struct Settings {
  std::vector<std::string> modules;
  std::vector<Setting> all;
  std::vector<std::uint32_t> mask;
  std::map<int, std::uint32_t> acting; // modules with something to do, by class of ops

  Settings(const config::Model& model, const std::vector<config::Run>& points) {
    for (const config::Run& r : points) {
      auto [it, fresh] = acting.try_emplace(ops_class(r), 0);
      if (!fresh) continue;
      Workload workload(model, r, kernels::provider_of(r.stack));
      for (const Setting& s : legal_settings(workload, false))
        if (s.granularity != Granularity::Full) it->second |= add(s);
    }
    const config::Run& first = points.front();
    auto legal = [&](const Setting& s) { return !model::any_rejected(model::validate(model, s.applied_to(first))); };
    auto full = [&](const char* method, std::int64_t n) {
      if (Setting s{Granularity::Full, method, n}; n <= model.layers() && legal(s)) {
        all.push_back(s);
        mask.push_back(0);
      }
    };
    for (std::int64_t n : {1, 2, 3, 4, 6, 8}) full("uniform", n);
    for (std::int64_t n = 1; n <= model.layers(); ++n) full("block", n);
  }

  // Whether a run has the setting: its modules act there, and full granularity goes as deep as a chunk.
  bool applies(size_t setting, const config::Run& run, std::int64_t depth) const {
    const Setting& s = all[setting];
    return s.granularity == Granularity::Full ? s.num_layers <= depth : (mask[setting] & ~acting.at(ops_class(run))) == 0;
  }

private:
  std::uint32_t add(const Setting& s) {
    std::uint32_t bits = 0;
    for (const std::string& m : s.modules) {
      auto it = std::find(modules.begin(), modules.end(), m);
      if (it == modules.end()) it = modules.insert(it, m);
      bits |= 1u << (it - modules.begin());
    }
    if (std::find(mask.begin(), mask.end(), bits) == mask.end()) {
      all.push_back(s);
      mask.push_back(bits);
    }
    return bits;
  }
};

// One op list, traced under every distinct set of spans once.
class Traced {
public:
  Traced(OpList list, bool input_gradient, const Settings& settings, const config::Run& run, TraceTemplates& templates)
      : list_(std::move(list)), input_gradient_(input_gradient), settings_(settings), stack_(run.stack), beside_(run.overlap_moe_expert_parallel_comm),
        work_(kernels::provider_of(stack_), list_), traces_(templates.of(list_, input_gradient)) {
    for (size_t i = 0; i < settings.modules.size(); ++i)
      if (model::acts_on(settings.modules[i], list_, stack_)) acting_ |= 1u << i;
  }

  const Extent& under(std::uint32_t mask, const cost::CostModel& cost) {
    mask &= acting_;
    auto [it, fresh] = known_.try_emplace(mask);
    if (fresh) it->second = price(mask, [&] { return spans(mask); }, cost);
    return it->second;
  }
  Extent full(const cost::CostModel& cost) const {
    return price(~0u, [&] { return model::full_spans(list_, stack_); }, cost);
  }
  std::vector<Span> spans(std::uint32_t mask) const {
    std::vector<std::string> names;
    for (size_t i = 0; i < settings_.modules.size(); ++i)
      if (mask >> i & 1) names.push_back(settings_.modules[i]);
    return model::spans_for(list_, names, {}, stack_);
  }
  const OpList& list() const { return list_; }

private:
  // `key` of the spans among those of the list: the mask of the modules, or all bits for full granularity.
  template <class Spans> Extent price(std::uint32_t key, Spans spans, const cost::CostModel& cost) const {
    program::TraceOptions options;
    options.input_gradient = input_gradient_;
    const program::UnitTrace& t = sized_trace(traces_, key, list_, spans, work_, options);
    if (!beside_) return extent_of(program::summarise(t), cost.time(t, work_));
    const cost::ExpertPasses p = cost.expert_passes(t, work_); // all of the exchanges may hide
    return extent_of(program::summarise(t), cost.time(t, work_), p.dispatch + p.combine, p.dispatch_backward + p.combine_backward);
  }

  OpList list_;
  bool input_gradient_;
  const Settings& settings_;
  std::string stack_;
  bool beside_;
  RememberedWork work_;
  TraceTemplates::Traces& traces_;
  std::uint32_t acting_ = 0;
  std::map<std::uint32_t, Extent> known_;
};

using Kind = std::pair<config::LayerKind, config::MlpKind>;

std::vector<Kind> kinds_of(const config::Model& model, std::vector<int>& kind_of) {
  std::vector<Kind> kinds;
  for (std::int64_t i = 0; i < model.layers(); ++i) {
    const Kind k{model.mixers[static_cast<size_t>(i)], model.mlps[static_cast<size_t>(i)]};
    auto it = std::find(kinds.begin(), kinds.end(), k);
    kind_of.push_back(static_cast<int>(it - kinds.begin()));
    if (it == kinds.end()) kinds.push_back(k);
  }
  return kinds;
}

// Extents of every setting at one (TP, CP, EP, ETP, micro-batch). Mixers depend on neither EP nor ETP:
// `mixers` is shared by the shapes of one (TP, CP, micro-batch).
class Shape {
public:
  using Mixers = std::map<config::LayerKind, std::unique_ptr<Traced>>;

  Shape(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const Settings& settings,
        const std::vector<Kind>& kinds, Mixers& mixers, TraceTemplates& templates)
      : settings_(settings), cost_(hardware, std::string(kernels::provider_of(run.stack).name()), run.parallel, run.dtype, run.overlap),
        embedding_(model::embedding_unit(model, run), false, settings, run, templates),
        head_(model::head_unit(model, run), true, settings, run, templates) {
    for (const Kind& k : kinds) {
      Traced whole(model::decoder_layer(model, run, k.first, k.second), true, settings, run, templates);
      std::vector<OpList> parts = halves(whole.list());
      Layer layer;
      if (parts.size() == 2) {
        auto& mixer = mixers[k.first];
        if (!mixer) mixer = std::make_unique<Traced>(std::move(parts[0]), true, settings, run, templates);
        layer.parts.push_back(mixer.get());
        layer.own.push_back(std::make_unique<Traced>(std::move(parts[1]), true, settings, run, templates));
      } else {
        for (OpList& p : parts) layer.own.push_back(std::make_unique<Traced>(std::move(p), true, settings, run, templates));
      }
      for (auto& t : layer.own) layer.parts.push_back(t.get());
      full_.push_back(whole.full(cost_));
      layers_.push_back(std::move(layer));
    }
    full_head_ = head_.under(0, cost_);
    const OpList& list = layers_[0].parts[0]->list();
    input_ = list.tensor(list.input).bytes();
  }

  // `setting`: index into the settings. Selective ones that differ in no op list share one object.
  const ShapeExtents& under(size_t setting) {
    const bool full = settings_.all[setting].granularity == Granularity::Full;
    const std::uint32_t mask = full ? 0 : settings_.mask[setting];
    auto [it, fresh] = extents_.try_emplace(mask);
    if (fresh) {
      ShapeExtents& e = it->second;
      for (Layer& layer : layers_) {
        Extent x = layer.parts[0]->under(mask, cost_);
        for (size_t i = 1; i < layer.parts.size(); ++i) x = x.then(layer.parts[i]->under(mask, cost_));
        e.kinds.push_back(x);
      }
      e.full = full_;
      e.input = input_;
      e.embedding = embedding_.under(0, cost_);
      e.head = head_.under(mask, cost_);
    }
    return it->second;
  }

private:
  struct Layer {
    std::vector<std::unique_ptr<Traced>> own;
    std::vector<Traced*> parts;
  };
  const Settings& settings_;
  cost::CostModel cost_;
  Traced embedding_, head_;
  std::vector<Layer> layers_;
  std::vector<Extent> full_;
  Extent full_head_;
  Bytes input_ = 0;
  std::map<std::uint32_t, ShapeExtents> extents_;
};

struct Candidate {
  Bound bound;
  std::uint32_t point = 0, setting = 0;
};

class Searcher {
public:
  Searcher(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const SearchOptions& options)
      : model_(model), hardware_(hardware), options_(options), budget_(options.budget.value_or(hardware.memory)),
        points_(parallel_points(model, run, options)) {
    if (points_.empty()) throw Error(ErrorCode::Config, "no legal layout of these GPUs and this global batch",
                                     "`check` says which rule a layout breaks; gpus and global batch need common divisors");
    kinds_ = kinds_of(model, kind_of_);
  }

  Search run() {
    const Settings settings(model_, points_);
    settings_ = &settings;
    out_.counts.parallel_points = static_cast<std::int64_t>(points_.size());
    prepare();
    // First the two ends of every point, no recompute and all of it: the fast and the small candidates
    // that they price settle most points whole.
    std::vector<size_t> ends, others;
    for (size_t s = 0; s < settings.all.size(); ++s) {
      const Setting& x = settings.all[s];
      const bool end = x.granularity == Granularity::None || (x.method == "uniform" && x.num_layers == 1);
      (end ? ends : others).push_back(s);
    }
    std::vector<std::uint32_t> open;
    for (std::uint32_t i = 0; i < points_.size(); ++i) {
      out_.counts.candidates += usable(i, ends) + usable(i, others);
      out_.counts.settings = std::max(out_.counts.settings, usable(i, ends) + usable(i, others));
      if (state(i) > budget_) out_.counts.static_state += usable(i, ends) + usable(i, others);
      else open.push_back(i);
    }
    least_step_.assign(points_.size(), 0);
    price(bounds(open, ends, 0.1, 0.2, "bounds of no and full recompute"), 0.3, 0.1);
    std::erase_if(open, [&](std::uint32_t i) { // recompute adds time and frees no static state
      const bool out = covered(least_step_[i], state(i));
      if (out) out_.counts.dominated += usable(i, others);
      return out;
    });
    price(bounds(open, others, 0.4, 0.4, "bounds of every setting"), 0.8, 0.2);
    finish();
    return std::move(out_);
  }

private:
  // What depends on few of the sizes: static state and schedules.
  void prepare() {
    using StateKey = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, int, bool>;
    std::map<StateKey, size_t> states;
    std::vector<const config::Run*> first;
    for (const config::Run& r : points_) {
      const config::Parallel& p = r.parallel;
      const StateKey key{p.tp, p.pp, p.vp, p.ep, p.etp, static_cast<int>(r.optimizer.gradient_dtype),
                         static_cast<int>(r.optimizer.moment1_dtype), r.optimizer.precision_aware};
      auto [it, fresh] = states.try_emplace(key, first.size());
      if (fresh) first.push_back(&r);
      state_of_.push_back(it->second);
      const int m = program::steady_micro_batches(static_cast<int>(p.pp), static_cast<int>(p.vp), static_cast<int>(r.micro_batches()), 0, forwards_ahead(r));
      auto& moments = moments_[{p.pp, p.vp, m}];
      for (int rank = static_cast<int>(moments.size()); rank < p.pp; ++rank)
        moments.push_back(fullest_moments(static_cast<int>(p.pp), rank, static_cast<int>(p.vp), m, forwards_ahead(r)));
      auto& chunks = chunks_[{p.pp, p.vp}];
      if (chunks.empty()) chunks = model::pipeline_chunks(model_.layers(), p);
    }
    report(0, "static state");
    states_.resize(first.size());
    after_.resize(first.size());
    for_each_parallel(first.size(), [&](size_t i, size_t) {
      const config::Run& run = *first[i];
      const model::ParameterTable table = model::parameter_table(model_, run);
      const model::Provider& provider = kernels::provider_of(run.stack);
      const cost::CostModel cost(hardware_, std::string(provider.name()), run.parallel, run.dtype, run.overlap);
      Seconds exchange = 0, update = 0;
      for (std::int64_t r = 0; r < run.parallel.pp; ++r) {
        const model::StaticState state = model::static_state(table, model_, run, r);
        states_[i].push_back(state.total());
        update = std::max(update, update_seconds(cost, provider, run, state));
        if (!run.overlap.gradients && !run.overlap.parameters) // else all of it may hide
          exchange = std::max(exchange, data_parallel_time(cost, run, state, r, {}).total());
      }
      after_[i] = (exchange + update) * (1 - 1e-9); // sums are rounded
    });
  }

  std::int64_t deepest(const config::Run& r) const {
    std::int64_t n = 0;
    for (const model::Chunk& c : chunks_.at({r.parallel.pp, r.parallel.vp})) n = std::max(n, c.layers);
    return n;
  }

  Bytes state(std::uint32_t point) const {
    const std::vector<Bytes>& ranks = states_[state_of_[point]];
    return *std::max_element(ranks.begin(), ranks.end());
  }

  // How many of `settings` a point has: full granularity goes as deep as its chunks.
  std::int64_t usable(std::uint32_t point, const std::vector<size_t>& settings) const {
    const std::int64_t depth = deepest(points_[point]);
    return std::count_if(settings.begin(), settings.end(), [&](size_t s) { return settings_->applies(s, points_[point], depth); });
  }

  // Bounds of `settings` at `points`: candidates that may fit and that nothing priced so far covers.
  std::vector<Candidate> bounds(const std::vector<std::uint32_t>& points, const std::vector<size_t>& settings, double from,
                                double share, const char* what) {
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::uint32_t>> groups; // (TP, CP, micro-batch)
    for (std::uint32_t i : points) groups[{points_[i].parallel.tp, points_[i].parallel.cp, points_[i].micro_batch}].push_back(i);
    struct Task {
      std::vector<std::uint32_t> points;
      std::vector<Candidate> found = {};
      std::int64_t over = 0, dominated = 0;
    };
    std::vector<Task> tasks;
    for (auto& [key, members] : groups) {
      std::stable_sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
        const config::Parallel &x = points_[a].parallel, &y = points_[b].parallel;
        return std::pair(x.ep, x.etp) < std::pair(y.ep, y.etp);
      });
      tasks.push_back({std::move(members)});
    }
    std::atomic<size_t> done = 0;
    templates_.resize(worker_count());
    for_each_parallel(tasks.size(), [&](size_t t, size_t worker) {
      Task& task = tasks[t];
      Shape::Mixers mixers;
      std::unique_ptr<Shape> shape;
      std::pair<std::int64_t, std::int64_t> current{0, 0};
      for (std::uint32_t i : task.points) {
        const config::Run& r = points_[i];
        if (!shape || current != std::pair(r.parallel.ep, r.parallel.etp)) {
          shape = std::make_unique<Shape>(model_, r, hardware_, *settings_, kinds_, mixers, templates_[worker]);
          current = {r.parallel.ep, r.parallel.etp};
        }
        const std::int64_t depth = deepest(r);
        for (size_t s : settings) {
          if (!settings_->applies(s, r, depth)) continue;
          const Bound b = bound(i, *shape, s);
          if (settings_->all[s].granularity == Granularity::None) least_step_[i] = b.step;
          if (b.peak > budget_) ++task.over;
          else if (covered(b.step, b.peak)) ++task.dominated;
          else task.found.push_back({b, i, static_cast<std::uint32_t>(s)});
        }
      }
      report(from + share * static_cast<double>(++done) / static_cast<double>(tasks.size()), what);
    });
    std::vector<Candidate> candidates;
    for (Task& t : tasks) {
      out_.counts.memory_bound += t.over;
      out_.counts.dominated += t.dominated;
      candidates.insert(candidates.end(), t.found.begin(), t.found.end());
    }
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return std::tuple(a.bound.step, a.bound.peak, a.point, a.setting) < std::tuple(b.bound.step, b.bound.peak, b.point, b.setting);
    });
    return candidates;
  }

  Bound bound(std::uint32_t point, Shape& shape, size_t setting) const {
    const config::Run& r = points_[point];
    const config::Parallel& p = r.parallel;
    const int m = program::steady_micro_batches(static_cast<int>(p.pp), static_cast<int>(p.vp), static_cast<int>(r.micro_batches()), 0, forwards_ahead(r));
    Bound b = lower_bound(shape.under(setting), settings_->all[setting], chunks_.at({p.pp, p.vp}), kind_of_, moments_.at({p.pp, p.vp, m}),
                          states_[state_of_[point]], r.micro_batches());
    b.step += after_[state_of_[point]];
    if (r.cpu_offloading || r.fine_grained_offload) b.peak = state(point); // what is kept may lie in host memory
    return b;
  }

  // Exact prices in the order of the step's bound, in batches of a fixed size: a candidate is left out
  // when one that was priced before is no slower and needs no more than its bounds.
  void price(const std::vector<Candidate>& candidates, double from, double share) {
    constexpr size_t kBatch = 32;
    size_t next = 0;
    while (next < candidates.size()) {
      std::vector<const Candidate*> batch;
      for (; next < candidates.size() && batch.size() < kBatch; ++next) {
        const Candidate& c = candidates[next];
        if (covered(c.bound.step, c.bound.peak)) ++out_.counts.dominated;
        else batch.push_back(&c);
      }
      // A point's settings share an estimator.
      std::vector<std::pair<std::uint32_t, std::vector<size_t>>> by_point;
      for (size_t i = 0; i < batch.size(); ++i) {
        auto it = std::find_if(by_point.begin(), by_point.end(), [&](const auto& p) { return p.first == batch[i]->point; });
        if (it == by_point.end()) it = by_point.insert(it, {batch[i]->point, {}});
        it->second.push_back(i);
        estimators_.try_emplace(batch[i]->point);
      }
      std::vector<std::optional<Estimate>> estimates(batch.size()); // empty: illegal
      for_each_parallel(by_point.size(), [&](size_t p, size_t) {
        const auto& [point, members] = by_point[p];
        std::unique_ptr<Estimator>& estimator = estimators_.at(point);
        for (size_t i : members) {
          try {
            if (!estimator) estimator = std::make_unique<Estimator>(model_, points_[point], hardware_, budget_);
            estimates[i] = estimator->evaluate(settings_->all[batch[i]->setting]);
          } catch (const Error&) { // one layout's, no reason to lose the others
          }
        }
      });
      for (size_t i = 0; i < batch.size(); ++i) {
        ++(estimates[i] ? out_.counts.evaluated : out_.counts.illegal);
        if (estimates[i]) insert(*batch[i], std::move(*estimates[i]));
      }
      if (estimators_.size() > 256) estimators_.clear();
      report(from + share * static_cast<double>(next) / static_cast<double>(candidates.size()), "exact prices");
    }
  }

  // Whether something priced is no slower and needs no more. `edge_` mirrors the front: steps rise, peaks fall.
  bool covered(Seconds step, Bytes peak) const {
    auto after = std::upper_bound(edge_.begin(), edge_.end(), step, [](Seconds s, const auto& e) { return s < e.first; });
    return after != edge_.begin() && (after - 1)->second <= peak;
  }

  void insert(const Candidate& c, Estimate e) {
    if (!least_ || e.total_bytes < least_->total_bytes) {
      least_ = e;
      least_point_ = c.point;
    }
    if (!e.fits) return;
    ++out_.fitting;
    if (covered(e.step_seconds, e.peak_bytes)) return;
    std::erase_if(out_.front, [&](const SearchPoint& p) {
      return e.step_seconds <= p.estimate.step_seconds && e.peak_bytes <= p.estimate.peak_bytes;
    });
    SearchPoint point{e.setting.applied_to(points_[c.point]), std::move(e)};
    auto at = std::find_if(out_.front.begin(), out_.front.end(), [&](const SearchPoint& p) {
      return p.estimate.step_seconds > point.estimate.step_seconds;
    });
    out_.front.insert(at, std::move(point));
    edge_.clear();
    for (const SearchPoint& p : out_.front) edge_.emplace_back(p.estimate.step_seconds, p.estimate.peak_bytes);
  }

  void finish() {
    if (out_.front.empty() && least_) out_.overrun = overrun_of(*least_);
    const config::Run& r = out_.front.empty() ? points_[least_point_] : out_.front.front().run;
    Estimator estimator(model_, r, hardware_, budget_);
    estimator.evaluate(Setting::of(r));
    out_.assumptions = estimator.assumptions();
  }

  void report(double share, const char* what) const {
    if (!options_.progress) return;
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    options_.progress(share, what);
  }

  const config::Model& model_;
  const config::Hardware& hardware_;
  const SearchOptions& options_;
  Bytes budget_;
  std::vector<config::Run> points_;
  std::vector<Kind> kinds_;
  std::vector<int> kind_of_;
  const Settings* settings_ = nullptr;
  std::vector<TraceTemplates> templates_; // per worker
  std::vector<size_t> state_of_;
  std::vector<std::vector<Bytes>> states_;
  std::vector<Seconds> after_; // exchanges and update once the last backward has ended, at least
  std::map<std::tuple<std::int64_t, std::int64_t, int>, std::vector<std::vector<Moment>>> moments_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<model::Chunk>> chunks_;
  std::vector<Seconds> least_step_; // of a point without recompute
  std::vector<std::pair<Seconds, Bytes>> edge_;
  std::map<std::uint32_t, std::unique_ptr<Estimator>> estimators_;
  std::optional<Estimate> least_;
  std::uint32_t least_point_ = 0;
  Search out_;
};

} // namespace

Search search(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const SearchOptions& options) {
  return Searcher(model, run, hardware, options).run();
}

} // namespace gdn::plan
