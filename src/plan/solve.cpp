#include "plan/solve.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/core.h>

#include "core/error.h"
#include "model/validate.h"

namespace gdn::plan {

namespace {

const std::vector<std::string> kNames{"seq", "micro-batch", "gpus", "budget"};
constexpr std::int64_t kLeastSeq = 1024; // of a search, and its finest step
constexpr std::int64_t kMostSeq = 1 << 24; // that a search looks at
constexpr std::int64_t kSeqParts = 16;   // of the longest power of two: how finely a search looks above it
constexpr Bytes kNoBudget = std::numeric_limits<Bytes>::max() / 4;

// A value of the unknown, priced.
struct Trial {
  bool legal = false;
  std::optional<Solution> best = {};              // the fastest that fits
  std::optional<Solution> least = {};             // the one that needs least, fitting or not
  Bytes floor = std::numeric_limits<Bytes>::max(); // no candidate needs less, scratch left out
};

class Solver {
public:
  Solver(const config::Model& model, const config::Run& run, const config::Hardware& hardware, Freedom freedom,
         const SolveOptions& options)
      : model_(model), run_(run), hardware_(hardware), freedom_(freedom), options_(options) {}

  Solved run(Unknown unknown) {
    switch (unknown) {
    case Unknown::Seq: freedom_ == Freedom::Search ? seq_ladder() : seq(); break;
    case Unknown::MicroBatch: micro_batch(); break;
    case Unknown::Gpus: gpus(); break;
    case Unknown::Budget: budget(); break;
    }
    return std::move(out_);
  }

private:
  // The largest multiple of the step. `floor` counts storages only, and each of them grows with the
  // tokens, so a value whose floor is over the budget rules out every larger one; scratch may shrink,
  // so the values below that limit are priced one by one.
  void seq() {
    const config::Parallel& p = run_.parallel;
    std::int64_t step = options_.step;
    if (step <= 0) step = std::lcm<std::int64_t>(1024, 2 * p.cp * (p.sequence_parallel ? p.tp : 1));
    auto at = [&](std::int64_t k) {
      config::Run r = run_;
      r.seq = k * step;
      return attempt(r, budget_bytes());
    };
    auto over = [&](std::int64_t k) {
      const Trial t = at(k);
      return t.legal && t.floor > budget_bytes();
    };
    std::int64_t low = 0, high = 1;
    for (; high * step < (std::int64_t{1} << 32) && !over(high); high *= 2) low = high;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (over(middle) ? high : low) = middle;
    }
    out_.guard = fmt::format("from {} tokens on, the tensors alone are over the budget, and none of them shrinks with a longer "
                             "sequence; every multiple of {} below was priced from the largest down",
                             format_count(high * step), format_count(step));
    for (std::int64_t k = low; k >= 1; --k)
      if (accept(at(k), k * step)) return;
  }

  // Lengths are doubled until nothing fits twice; then the gap above the longest is halved.
  void seq_ladder() {
    auto fits = [&](std::int64_t seq) {
      config::Run r = run_;
      r.seq = seq;
      return accept(attempt(r, budget_bytes()), seq);
    };
    int misses = 0;
    for (std::int64_t seq = kLeastSeq; misses < 2 && seq <= kMostSeq; seq *= 2) {
      if (fits(seq)) misses = 0;
      else if (out_.solution || seq > run_.seq) ++misses;
    }
    out_.guard = "lengths were doubled until nothing fitted twice, and each was searched whole";
    if (!out_.solution) return;
    if (out_.solution->value == kMostSeq) { // what is twice as long was not tried
      out_.guard = fmt::format("lengths were doubled up to {}, the longest that a search looks at, and it fits; nothing is claimed about "
                               "longer ones", format_count(kMostSeq));
      return;
    }
    const std::int64_t longest = out_.solution->value, step = std::max(kLeastSeq, longest / kSeqParts);
    std::int64_t low = longest, high = 2 * longest;
    while (high - low > step) {
      const std::int64_t middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    out_.guard += fmt::format("; then the gap from {} to {} was halved: {} does not fit. Longer ones may allow more context parallelism, so "
                              "nothing is claimed about lengths that were not tried", format_count(longest), format_count(2 * longest), format_count(high));
  }

  void micro_batch() {
    out_.guard = "every divisor of the sequences a data-parallel rank gets was a candidate, largest first: more of them in flight can "
                 "need more than a larger one";
    const std::int64_t each = run_.global_batch / (freedom_ == Freedom::Search ? 1 : run_.parallel.dp());
    for (std::int64_t n = each; n >= 1; --n) {
      if (each % n != 0) continue;
      config::Run r = run_;
      r.micro_batch = n;
      if (accept(attempt(r, budget_bytes(), n), n)) return;
    }
  }

  void gpus() {
    const config::Parallel& p = run_.parallel;
    out_.guard = freedom_ == Freedom::Search
                     ? fmt::format("1, 2, 4 and every multiple of {} GPUs was searched, fewest first", hardware_.scale_up_domain)
                     : "every number of GPUs that the sizes and the global batch allow was priced, fewest first";
    auto fits = [&](std::int64_t n) {
      config::Run r = run_;
      r.parallel.gpus = n;
      return accept(attempt(r, budget_bytes()), n);
    };
    if (freedom_ == Freedom::Search) {
      for (std::int64_t n = 1; n <= options_.most_gpus; n < hardware_.scale_up_domain ? n *= 2 : n += hardware_.scale_up_domain)
        if (fits(n)) return;
      return;
    }
    const std::int64_t model_size = p.tp * p.cp * p.pp;
    for (std::int64_t dp = 1; dp <= run_.global_batch / run_.micro_batch && dp * model_size <= options_.most_gpus; ++dp)
      if (run_.global_batch % (run_.micro_batch * dp) == 0 && fits(dp * model_size)) return;
  }

  // The least total; a layout that needs less in all may have a higher peak, so a search is repeated
  // under what was found until nothing fits.
  void budget() {
    Trial t = attempt(run_, kNoBudget);
    out_.guard = freedom_ == Freedom::Setting ? "the setting is given"
                 : freedom_ == Freedom::Plan  ? "every legal setting was priced"
                                              : "searched again below each find until nothing fitted";
    while (t.least) {
      t.least->value = t.least->estimate.total_bytes;
      out_.solution = t.least;
      if (freedom_ != Freedom::Search) return;
      t = attempt(run_, t.least->value - 1);
      if (!t.best) return;
    }
  }

  bool accept(Trial t, std::int64_t value) {
    if (!t.best) return false;
    t.best->value = value;
    out_.solution = std::move(t.best);
    return true;
  }

  Trial attempt(const config::Run& r, Bytes budget, std::optional<std::int64_t> micro_batch = {}) {
    Trial t;
    if (freedom_ == Freedom::Search) {
      ++out_.tried;
      search_at(r, budget, micro_batch, t);
      return t;
    }
    const Setting own = freedom_ == Freedom::Setting ? Setting::of(run_) : Setting{};
    if (model::any_rejected(model::validate(model_, own.applied_to(r)))) {
      ++out_.skipped;
      return t;
    }
    ++out_.tried;
    t.legal = true;
    if (options_.progress) options_.progress(0, fmt::format("{} tried", out_.tried).c_str());
    Estimator estimator(model_, r, hardware_, budget);
    const std::vector<Setting> settings =
        freedom_ == Freedom::Setting ? std::vector<Setting>{own} : legal_settings(estimator.workload(), false);
    for (const Setting& s : settings) {
      const Estimate e = estimator.evaluate(s);
      Bytes storages = 0;
      for (const RankEstimate& rank : e.ranks) storages = std::max(storages, rank.peak.bytes - rank.peak.by[Category::Workspace]);
      t.floor = std::min(t.floor, storages);
      if (e.fits && (!t.best || e.tokens_per_second > t.best->estimate.tokens_per_second)) t.best = Solution{0, s.applied_to(r), e};
      if (!t.least || e.total_bytes < t.least->estimate.total_bytes) t.least = Solution{0, s.applied_to(r), e};
    }
    return t;
  }

  void search_at(const config::Run& r, Bytes budget, std::optional<std::int64_t> micro_batch, Trial& t) {
    SearchOptions options;
    options.budget = budget;
    options.micro_batch = micro_batch;
    options.progress = options_.progress;
    if (parallel_points(model_, r, options).empty()) {
      ++out_.skipped;
      return;
    }
    const Search found = search(model_, r, hardware_, options);
    t.legal = true;
    for (const SearchPoint& p : found.front) {
      if (!t.best) t.best = Solution{0, p.run, p.estimate};
      if (!t.least || p.estimate.total_bytes < t.least->estimate.total_bytes) t.least = Solution{0, p.run, p.estimate};
    }
  }

  Bytes budget_bytes() const { return options_.budget.value_or(hardware_.memory); }

  const config::Model& model_;
  const config::Run& run_;
  const config::Hardware& hardware_;
  Freedom freedom_;
  const SolveOptions& options_;
  Solved out_;
};

} // namespace

Unknown parse_unknown(const std::string& text) {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == text) return static_cast<Unknown>(i);
  throw Error(ErrorCode::Usage, fmt::format("--solve: unknown quantity '{}'{}", text, did_you_mean(text, kNames)),
              "seq, micro-batch, gpus or budget");
}

Solved solve(const config::Model& model, const config::Run& run, const config::Hardware& hardware, Unknown unknown,
             Freedom freedom, const SolveOptions& options) {
  return Solver(model, run, hardware, freedom, options).run(unknown);
}

} // namespace gdn::plan
