#include "plan/search.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "core/error.h"
#include "model/spans.h"
#include "model/stack_lists.h"
#include "model/validate.h"
#include "plan/bound.h"
#include "plan/halves.h"
#include "plan/parallel.h"

namespace gdn::plan {

using config::Granularity;
using model::OpList;
using model::Span;

namespace {

// Recompute settings of a search with the modules each lists as bits. They are the same for every
// point: the stack's rules on recompute and on parallelism are separate ones.
struct Settings {
  std::vector<std::string> modules;
  std::vector<Setting> all;
  std::vector<std::uint32_t> mask;

  Settings(const config::Model& model, const config::Run& first) {
    Workload workload(model, first, model::upstream_provider());
    for (const Setting& s : legal_settings(workload, false))
      if (s.granularity != Granularity::Full) add(s);
    auto legal = [&](const Setting& s) { return !model::any_rejected(model::validate(model, s.applied_to(first))); };
    auto full = [&](const char* method, std::int64_t n) {
      if (Setting s{Granularity::Full, method, n}; n <= model.layers() && legal(s)) add(s);
    };
    for (std::int64_t n : {1, 2, 3, 4, 6, 8}) full("uniform", n);
    for (std::int64_t n = 1; n <= model.layers(); ++n) full("block", n);
  }

  void add(const Setting& s) {
    std::uint32_t bits = 0;
    for (const std::string& m : s.modules) {
      auto it = std::find(modules.begin(), modules.end(), m);
      if (it == modules.end()) it = modules.insert(it, m);
      bits |= 1u << (it - modules.begin());
    }
    all.push_back(s);
    mask.push_back(bits);
  }
};

// One op list, traced under every distinct set of spans once.
class Traced {
public:
  Traced(OpList list, bool input_gradient, const Settings& settings, const config::Run& run)
      : list_(std::move(list)), input_gradient_(input_gradient), settings_(settings), stack_(run.stack) {
    for (size_t i = 0; i < settings.modules.size(); ++i)
      if (model::acts_on(settings.modules[i], list_, stack_)) acting_ |= 1u << i;
  }

  const Extent& under(std::uint32_t mask, const cost::CostModel& cost) {
    mask &= acting_;
    auto [it, fresh] = known_.try_emplace(mask);
    if (fresh) it->second = price(spans(mask), cost);
    return it->second;
  }
  Extent full(const cost::CostModel& cost) const { return price(model::full_spans(list_, stack_), cost); }
  std::vector<Span> spans(std::uint32_t mask) const {
    std::vector<std::string> names;
    for (size_t i = 0; i < settings_.modules.size(); ++i)
      if (mask >> i & 1) names.push_back(settings_.modules[i]);
    return model::spans_for(list_, names, {}, stack_);
  }
  const OpList& list() const { return list_; }

private:
  Extent price(const std::vector<Span>& spans, const cost::CostModel& cost) const {
    const model::Provider& provider = model::upstream_provider();
    program::TraceOptions options;
    options.input_gradient = input_gradient_;
    const program::UnitTrace t = program::trace(list_, spans, provider, options);
    return extent_of(program::summarise(t), cost.time(t, provider));
  }

  OpList list_;
  bool input_gradient_;
  const Settings& settings_;
  std::string stack_;
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
        const std::vector<Kind>& kinds, Mixers& mixers)
      : settings_(settings), cost_(hardware, "upstream", run.parallel, run.dtype),
        embedding_(model::embedding_unit(model, run), false, settings, run),
        head_(model::head_unit(model, run), true, settings, run) {
    for (const Kind& k : kinds) {
      Traced whole(model::decoder_layer(model, run, k.first, k.second), true, settings, run);
      std::vector<OpList> parts = halves(whole.list());
      Layer layer;
      if (parts.size() == 2) {
        auto& mixer = mixers[k.first];
        if (!mixer) mixer = std::make_unique<Traced>(std::move(parts[0]), true, settings, run);
        layer.parts.push_back(mixer.get());
        layer.own.push_back(std::make_unique<Traced>(std::move(parts[1]), true, settings, run));
      } else {
        for (OpList& p : parts) layer.own.push_back(std::make_unique<Traced>(std::move(p), true, settings, run));
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
        points_(parallel_points(model, run, options.optimizer_options)) {
    if (points_.empty()) throw Error(ErrorCode::Config, "no legal layout of these GPUs and this global batch",
                                     "`check` says which rule a layout breaks; gpus and global batch need common divisors");
    kinds_ = kinds_of(model, kind_of_);
  }

  Search run() {
    const Settings settings(model_, points_.front());
    settings_ = &settings;
    out_.counts.parallel_points = static_cast<std::int64_t>(points_.size());
    prepare();
    bound_all();
    price();
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
      const int m = program::steady_micro_batches(static_cast<int>(p.pp), static_cast<int>(p.vp), static_cast<int>(r.micro_batches()));
      auto& moments = moments_[{p.pp, p.vp, m}];
      for (int rank = static_cast<int>(moments.size()); rank < p.pp; ++rank)
        moments.push_back(fullest_moments(static_cast<int>(p.pp), rank, static_cast<int>(p.vp), m));
      auto& chunks = chunks_[{p.pp, p.vp}];
      if (chunks.empty()) chunks = model::pipeline_chunks(model_.layers(), p);
    }
    states_.resize(first.size());
    for_each_parallel(first.size(), [&](size_t i, size_t) {
      const model::ParameterTable table = model::parameter_table(model_, *first[i]);
      for (std::int64_t r = 0; r < first[i]->parallel.pp; ++r)
        states_[i].push_back(model::static_state(table, model_, *first[i], r).total());
      report(i, first.size(), 0, 0.2, "static state");
    });
  }

  std::int64_t deepest(const config::Run& r) const {
    std::int64_t n = 0;
    for (const model::Chunk& c : chunks_.at({r.parallel.pp, r.parallel.vp})) n = std::max(n, c.layers);
    return n;
  }

  // Bounds of every candidate whose static state leaves room; kept where they may fit.
  void bound_all() {
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::uint32_t>> groups; // by (TP, CP, micro-batch)
    for (std::uint32_t i = 0; i < points_.size(); ++i) {
      const config::Run& r = points_[i];
      std::int64_t usable = 0;
      const std::int64_t depth = deepest(r);
      for (const Setting& s : settings_->all) usable += s.granularity != Granularity::Full || s.num_layers <= depth;
      out_.counts.settings = std::max(out_.counts.settings, usable);
      out_.counts.candidates += usable;
      const std::vector<Bytes>& state = states_[state_of_[i]];
      if (*std::max_element(state.begin(), state.end()) > budget_) out_.counts.static_state += usable;
      else groups[{r.parallel.tp, r.parallel.cp, r.micro_batch}].push_back(i);
    }
    std::vector<std::vector<std::uint32_t>*> work;
    for (auto& [key, members] : groups) work.push_back(&members);
    std::vector<std::vector<Candidate>> found(work.size());
    std::vector<std::int64_t> over(work.size());
    for_each_parallel(work.size(), [&](size_t g, size_t) {
      std::vector<std::uint32_t>& members = *work[g];
      std::stable_sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
        const config::Parallel &x = points_[a].parallel, &y = points_[b].parallel;
        return std::pair(x.ep, x.etp) < std::pair(y.ep, y.etp);
      });
      Shape::Mixers mixers;
      std::unique_ptr<Shape> shape;
      std::pair<std::int64_t, std::int64_t> current{0, 0};
      for (std::uint32_t i : members) {
        const config::Run& r = points_[i];
        if (!shape || current != std::pair(r.parallel.ep, r.parallel.etp)) {
          shape = std::make_unique<Shape>(model_, r, hardware_, *settings_, kinds_, mixers);
          current = {r.parallel.ep, r.parallel.etp};
        }
        over[g] += bound_point(i, *shape, found[g]);
      }
      report(g, work.size(), 0.2, 0.6, "lower bounds");
    });
    for (size_t g = 0; g < work.size(); ++g) {
      out_.counts.memory_bound += over[g];
      candidates_.insert(candidates_.end(), found[g].begin(), found[g].end());
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return std::tuple(a.bound.step, a.bound.peak, a.point, a.setting) < std::tuple(b.bound.step, b.bound.peak, b.point, b.setting);
    });
  }

  std::int64_t bound_point(std::uint32_t i, Shape& shape, std::vector<Candidate>& out) const {
    const config::Run& r = points_[i];
    const config::Parallel& p = r.parallel;
    const int m = program::steady_micro_batches(static_cast<int>(p.pp), static_cast<int>(p.vp), static_cast<int>(r.micro_batches()));
    const auto& moments = moments_.at({p.pp, p.vp, m});
    const auto& chunks = chunks_.at({p.pp, p.vp});
    const std::int64_t depth = deepest(r);
    std::int64_t over = 0;
    for (size_t s = 0; s < settings_->all.size(); ++s) {
      const Setting& setting = settings_->all[s];
      if (setting.granularity == Granularity::Full && setting.num_layers > depth) continue;
      const Bound b = lower_bound(shape.under(s), setting, chunks, kind_of_, moments, states_[state_of_[i]], r.micro_batches());
      if (b.peak > budget_) ++over;
      else out.push_back({b, i, static_cast<std::uint32_t>(s)});
    }
    return over;
  }

  // Exact prices in the order of the step's bound, in batches of a fixed size: a candidate is left out
  // when one that was priced before is no slower and needs no more than its bounds.
  void price() {
    constexpr size_t kBatch = 32;
    size_t next = 0;
    while (next < candidates_.size()) {
      std::vector<const Candidate*> batch;
      for (; next < candidates_.size() && batch.size() < kBatch; ++next) {
        const Candidate& c = candidates_[next];
        if (covered(c.bound.step, c.bound.peak)) ++out_.counts.dominated;
        else batch.push_back(&c);
      }
      // A point's settings share an estimator.
      std::vector<std::pair<std::uint32_t, std::vector<size_t>>> by_point;
      for (size_t i = 0; i < batch.size(); ++i) {
        auto it = std::find_if(by_point.begin(), by_point.end(), [&](const auto& p) { return p.first == batch[i]->point; });
        if (it == by_point.end()) it = by_point.insert(it, {batch[i]->point, {}});
        it->second.push_back(i);
        auto& estimator = estimators_[batch[i]->point];
        if (!estimator) estimator = std::make_unique<Estimator>(model_, points_[batch[i]->point], hardware_, budget_);
      }
      std::vector<Estimate> estimates(batch.size());
      for_each_parallel(by_point.size(), [&](size_t p, size_t) {
        for (size_t i : by_point[p].second)
          estimates[i] = estimators_.at(by_point[p].first)->evaluate(settings_->all[batch[i]->setting]);
      });
      for (size_t i = 0; i < batch.size(); ++i) insert(*batch[i], std::move(estimates[i]));
      out_.counts.evaluated += static_cast<std::int64_t>(batch.size());
      if (estimators_.size() > 256) estimators_.clear();
      report(next, candidates_.size(), 0.8, 0.2, "exact prices");
    }
  }

  bool covered(Seconds step, Bytes peak) const {
    return std::any_of(out_.front.begin(), out_.front.end(), [&](const SearchPoint& p) {
      return p.estimate.step_seconds <= step && p.estimate.peak_bytes <= peak;
    });
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
  }

  void finish() {
    if (out_.front.empty() && least_) out_.overrun = overrun_of(*least_);
    const config::Run& r = out_.front.empty() ? points_[least_point_] : out_.front.front().run;
    Estimator estimator(model_, r, hardware_, budget_);
    estimator.evaluate(Setting::of(r));
    out_.assumptions = estimator.assumptions();
  }

  void report(size_t done, size_t all, double from, double share, const char* what) const {
    if (!options_.progress) return;
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    options_.progress(from + share * static_cast<double>(done + 1) / static_cast<double>(all), what);
  }

  const config::Model& model_;
  const config::Hardware& hardware_;
  const SearchOptions& options_;
  Bytes budget_;
  std::vector<config::Run> points_;
  std::vector<Kind> kinds_;
  std::vector<int> kind_of_;
  const Settings* settings_ = nullptr;
  std::vector<size_t> state_of_;
  std::vector<std::vector<Bytes>> states_;
  std::map<std::tuple<std::int64_t, std::int64_t, int>, std::vector<std::vector<Moment>>> moments_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<model::Chunk>> chunks_;
  std::vector<Candidate> candidates_;
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
