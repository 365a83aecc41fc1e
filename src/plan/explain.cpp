#include "plan/explain.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "model/validate.h"

namespace gdn::plan {

using config::Granularity;

namespace {

Setting only(const std::string& module) {
  Setting s;
  s.granularity = Granularity::Selective;
  s.modules = {module};
  return s;
}

Setting left_out(Setting s, const std::string& module) {
  std::erase(s.modules, module);
  if (s.modules.empty()) s.granularity = Granularity::None;
  return s;
}

std::string largest_at(const RankEstimate& r) {
  std::vector<std::string> parts;
  for (const auto& [name, bytes] : r.largest) parts.push_back(fmt::format("{} {}", name, format_bytes(bytes)));
  return fmt::format("{}", fmt::join(parts, ", "));
}

class Explainer {
public:
  Explainer(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const Setting& setting,
            std::optional<Bytes> budget)
      : model_(model), run_(run), hardware_(hardware), setting_(setting), budget_(budget), estimator_(model, run, hardware, budget) {}

  Explanation run() {
    out_.without = estimator_.evaluate(Setting{});
    out_.with = estimator_.evaluate(setting_);
    for (const std::string& m : setting_.modules) out_.modules.push_back(effect(m));
    findings();
    recompute_levers();
    run_levers();
    std::erase_if(out_.levers, [](const Lever& l) { return l.freed <= 0; });
    std::stable_sort(out_.levers.begin(), out_.levers.end(), [](const Lever& a, const Lever& b) { return a.freed > b.freed; });
    out_.assumptions = estimator_.assumptions();
    return std::move(out_);
  }

private:
  const RankEstimate& peaking(const Estimate& e) const { return e.ranks[static_cast<size_t>(out_.with.worst)]; }

  ModuleEffect effect(const std::string& module) {
    ModuleEffect m;
    m.module = module;
    m.layers = estimator_.workload().layers_with(module);
    const Estimate alone = estimator_.evaluate(only(module)), rest = estimator_.evaluate(left_out(setting_, module));
    const RankEstimate& a = peaking(out_.without);
    const RankEstimate& b = peaking(alone);
    m.retained_freed = a.retained_per_micro_batch - b.retained_per_micro_batch;
    m.promised = m.retained_freed * a.in_flight;
    m.alone = out_.without.peak_bytes - alone.peak_bytes;
    m.marginal = rest.peak_bytes - out_.with.peak_bytes;
    m.replay = out_.with.recompute_seconds - rest.recompute_seconds;
    for (const Notice& n : setting_notices(estimator_.workload(), setting_))
      if (n.key == "inert." + module || n.key == "nested." + module) m.reasons.push_back(n.text);
    if (m.promised > 0 && m.alone < m.promised - m.promised / 50) {
      const RankEstimate& now = alone.worst_rank();
      if (alone.worst != out_.without.worst)
        m.reasons.push_back(fmt::format("with it, rank {} is the fullest instead of rank {}", alone.worst, out_.without.worst));
      if (now.peak_event != out_.without.worst_rank().peak_event)
        m.reasons.push_back(fmt::format("the peak moves from {} to {}", out_.without.worst_rank().peak_event, now.peak_event));
      else
        m.reasons.push_back(fmt::format("the peak stays at {}: what it makes again is alive there, or was not alive before", now.peak_event));
    }
    if (m.layers > 0 && m.marginal < m.alone / 2) m.reasons.push_back("the other modules already free most of it");
    return m;
  }

  void findings() {
    const Estimate &a = out_.without, &b = out_.with;
    const RankEstimate& w = b.worst_rank();
    const Bytes freed = a.peak_bytes - b.peak_bytes, state = w.state.total();
    Bytes promised = peaking(a).retained_per_micro_batch - peaking(b).retained_per_micro_batch;
    promised *= peaking(a).in_flight;
    auto say = [&](std::string text) { out_.findings.push_back(std::move(text)); };
    if (setting_.text() != "none")
      say(fmt::format("{} frees {} of retained activations on rank {} ({} micro-batch{} in flight), and the peak {} by {}", setting_.text(),
                      format_bytes(promised), w.rank, peaking(a).in_flight, peaking(a).in_flight == 1 ? "" : "es",
                      freed < 0 ? "rises" : "falls", format_bytes(freed < 0 ? -freed : freed)));
    say(fmt::format("the peak is now in {}: {}{}; largest there: {}", w.peak_phase, b.ranks.size() > 1 ? fmt::format("rank {}, ", w.rank) : "",
                    w.peak_event, largest_at(w)));
    if (w.peak_phase == "replay" || w.peak_event.find("replay") != std::string::npos)
      say("a replay sets the peak: what it makes again is alive beside the backward's own tensors, once, whatever is freed elsewhere");
    if (w.peak_phase == "loss")
      say(fmt::format("the loss sets the peak ({} of logits): no recompute module reaches it", format_bytes(b.categories[Category::Logits])));
    if (state > b.peak_bytes / 2)
      say(fmt::format("static state is {} of the {}: no recompute module changes it", format_bytes(state), format_bytes(b.peak_bytes)));
    if (b.worst != a.worst) say(fmt::format("without recompute rank {} was the fullest, now rank {}", a.worst, b.worst));
    const Bytes other = b.categories[Category::Transient] + b.categories[Category::Workspace];
    if (other > b.categories[Category::Activations] && freed < promised)
      say(fmt::format("transients and workspace ({}) outweigh what is still retained ({})", format_bytes(other),
                      format_bytes(b.categories[Category::Activations])));
  }

  void consider(std::string change, const Estimate& e, bool recompute) {
    out_.levers.push_back({std::move(change), e, out_.with.peak_bytes - e.peak_bytes,
                           out_.with.tokens_per_second / e.tokens_per_second - 1, recompute});
  }

  void recompute_levers() {
    auto legal = [&](const Setting& s) { return !model::any_rejected(model::validate(model_, s.applied_to(run_))); };
    for (const Setting& s : legal_settings(estimator_.workload(), false)) {
      if (setting_.granularity == Granularity::Full || s.granularity != Granularity::Selective || s.modules.size() != 1) continue;
      const std::string& m = s.modules.front();
      if (std::find(setting_.modules.begin(), setting_.modules.end(), m) != setting_.modules.end()) continue;
      Setting more = setting_;
      more.granularity = Granularity::Selective;
      more.modules.push_back(m);
      if (legal(more)) consider("also recompute " + m, estimator_.evaluate(more), true);
    }
    for (const std::string& m : setting_.modules)
      if (const Setting less = left_out(setting_, m); legal(less)) consider("leave out " + m, estimator_.evaluate(less), true);
    if (const Setting full{Granularity::Full, "uniform", 1}; setting_.granularity != Granularity::Full && legal(full))
      consider("full recompute, uniform 1", estimator_.evaluate(full), true);
  }

  // The same setting on a run with one thing changed, where that is legal.
  void run_levers() {
    auto attempt = [&](std::string change, auto edit) {
      config::Run r = run_;
      edit(r);
      r = setting_.applied_to(r);
      if (model::any_rejected(model::validate(model_, r))) return;
      try {
        Estimator e(model_, r, hardware_, budget_);
        consider(std::move(change), e.evaluate(setting_), false);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::Config) throw; // not a layout of this model
      }
    };
    const config::Parallel& p = run_.parallel;
    auto twice = [&](const char* what, std::int64_t config::Parallel::*size) {
      attempt(fmt::format("{} {}", what, p.*size * 2), [&](config::Run& r) {
        r.parallel.*size *= 2;
        r.parallel.sequence_parallel = r.parallel.sequence_parallel || r.parallel.tp > 1;
        if (r.parallel.pp != p.pp) r.parallel.layout.clear();
      });
    };
    if (run_.micro_batch > 1) attempt(fmt::format("micro-batch {}", run_.micro_batch / 2), [](config::Run& r) { r.micro_batch /= 2; });
    twice("TP", &config::Parallel::tp);
    twice("CP", &config::Parallel::cp);
    twice("PP", &config::Parallel::pp);
    twice("EP", &config::Parallel::ep);
    if (run_.cross_entropy != config::CrossEntropy::FusedTe)
      attempt("cross entropy fused by Transformer Engine", [](config::Run& r) { r.cross_entropy = config::CrossEntropy::FusedTe; });
    if (run_.cross_entropy != config::CrossEntropy::ChunkedLinear)
      attempt("head and cross entropy in chunks of 1,024 tokens", [](config::Run& r) {
        r.cross_entropy = config::CrossEntropy::ChunkedLinear;
        r.loss_chunk = 1024;
      });
    if (run_.optimizer.gradient_dtype == DType::FP32) attempt("bf16 gradients", [](config::Run& r) { r.optimizer.gradient_dtype = DType::BF16; });
    if (!run_.optimizer.precision_aware)
      attempt("precision-aware optimizer, bf16 moments", [](config::Run& r) {
        r.optimizer.precision_aware = true;
        r.optimizer.master_dtype = r.optimizer.moment1_dtype = r.optimizer.moment2_dtype = DType::BF16;
      });
    if (!run_.optimizer.distributed) attempt("distributed optimizer", [](config::Run& r) { r.optimizer.distributed = true; });
    if (run_.train_mtp && model_.mtp_layers > 0) attempt("no multi-token prediction", [](config::Run& r) { r.train_mtp = false; });
    attempt(fmt::format("sequences of {} tokens", format_count(run_.seq / 2)), [](config::Run& r) { r.seq /= 2; });
  }

  const config::Model& model_;
  const config::Run& run_;
  const config::Hardware& hardware_;
  Setting setting_;
  std::optional<Bytes> budget_;
  Estimator estimator_;
  Explanation out_;
};

} // namespace

Explanation explain(const config::Model& model, const config::Run& run, const config::Hardware& hardware, const Setting& setting,
                    std::optional<Bytes> budget) {
  return Explainer(model, run, hardware, setting, budget).run();
}

} // namespace gdn::plan
