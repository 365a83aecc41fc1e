#include "plan/plan.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "core/error.h"
#include "model/modules.h"
#include "model/spans.h"
#include "model/validate.h"

namespace gdn::plan {

using config::Granularity;

namespace {

// Modules that act somewhere in the model, in the order of the stack's own table.
std::vector<std::string> acting_modules(const Workload& w, bool hypothetical) {
  std::vector<std::string> names;
  auto consider = [&](const std::string& name) {
    if (w.layers_with(name) > 0) names.push_back(name);
  };
  if (w.run().stack == "native") {
    for (const model::SpanSpec& s : model::native_spans())
      if (!s.by_default && std::find(names.begin(), names.end(), s.module) == names.end()) consider(s.module);
    return names;
  }
  for (const std::string& name : model::offered_modules(w.run().revision)) {
    consider(name);
    const model::Module* module = model::find_module(name);
    if (hypothetical && module && module->kind == model::SpanKind::WholeBlock) consider(name + ":discard");
  }
  return names;
}

bool conflict(const std::vector<std::string>& modules) {
  for (size_t i = 0; i < modules.size(); ++i)
    for (size_t j = i + 1; j < modules.size(); ++j) {
      const model::ModuleName a = model::parse_module(modules[i]), b = model::parse_module(modules[j]);
      if (a.name == b.name || model::find_conflict(a.name, b.name)) return true;
    }
  return false;
}

// Whether the stack accepts the run with this setting.
bool legal(const Workload& w, const Setting& s) {
  return !model::any_rejected(model::validate(w.model(), s.applied_to(w.run())));
}

bool is_hypothetical(const Setting& s, const std::string& stack) {
  return !s.user_spans.empty() || std::any_of(s.modules.begin(), s.modules.end(), [&](const std::string& m) {
    return stack == "megatron" && model::is_hypothetical(model::parse_module(m));
  });
}

} // namespace

std::vector<Setting> legal_settings(Workload& w, bool hypothetical) {
  std::vector<Setting> settings;
  auto add = [&](Setting s) {
    if (legal(w, s)) settings.push_back(std::move(s));
  };
  const std::vector<std::string> names = acting_modules(w, hypothetical);
  for (std::uint64_t mask = 0; mask < (std::uint64_t{1} << names.size()); ++mask) {
    Setting s;
    s.granularity = mask ? Granularity::Selective : Granularity::None;
    for (size_t i = 0; i < names.size(); ++i)
      if (mask >> i & 1) s.modules.push_back(names[i]);
    if (w.run().stack == "native" || !conflict(s.modules)) add(s);
    if (hypothetical && !w.run().recompute.user_spans.empty()) {
      s.granularity = Granularity::Selective;
      s.user_spans = w.run().recompute.user_spans;
      if (w.run().stack == "native" || !conflict(s.modules)) add(s);
    }
  }
  std::int64_t deepest = 0;
  for (const model::Chunk& c : model::pipeline_chunks(w.model().layers(), w.run().parallel))
    deepest = std::max(deepest, c.layers);
  for (std::int64_t n : {1, 2, 3, 4, 6, 8})
    if (n <= deepest) add({Granularity::Full, "uniform", n});
  for (std::int64_t n = 1; n <= deepest; ++n) add({Granularity::Full, "block", n});
  return settings;
}

std::vector<std::string> megatron_flags(const Setting& s) {
  switch (s.granularity) {
  case Granularity::None: return {};
  case Granularity::Full:
    return {"--recompute-granularity", "full", "--recompute-method", s.method, "--recompute-num-layers",
            fmt::format("{}", s.num_layers)};
  case Granularity::Selective: {
    std::vector<std::string> flags{"--recompute-granularity", "selective", "--recompute-modules"};
    flags.insert(flags.end(), s.modules.begin(), s.modules.end());
    return flags;
  }
  }
  return {};
}

// -------------------------------------------------------------------------------------- notices ----

namespace {

std::string layers_of(const Workload& w, std::int64_t n) {
  return fmt::format("{} of {} layers", n, w.model().layers());
}

// Why a module has nothing to act on in this model.
std::string why_inert(const Workload& w, const std::string& module) {
  const config::Model& m = w.model();
  const bool te = w.run().build == config::Build::Te;
  if (module == "mlp") return "every layer is a mixture of experts: there is no dense MLP to recompute";
  if (module == "layernorm") return te ? "every norm is fused into the projection behind it" : "there is no separate norm";
  if (module == "moe" || module == "moe_act") return "no layer is a mixture of experts";
  if (module == "shared_experts") return m.moe.experts > 0 ? "the experts have no shared one" : "no layer is a mixture of experts";
  if (module == "core_attn") return "no layer is full attention";
  if (module.rfind("gdn", 0) == 0) return "no layer of this model has these ops";
  return "no layer of this model has these ops (it belongs to another architecture)";
}

} // namespace

std::vector<Notice> unmodelled_notices(const config::Model& model, const config::Run& run) {
  if (model::totals(model::parameter_table(model, run)).vision == 0) return {};
  return {{"unmodelled.vision", fmt::format("vision tower ({}): its parameters are counted, its activations are not modelled",
                                            config::name_of(run.vision))}};
}

std::optional<Notice> fragmentation_notice(const Estimate& e) {
  // Publicly reported failures at 70 to 80 % of a card: memory there is enough, contiguous memory is not.
  if (static_cast<double>(e.peak_bytes) < 0.70 * static_cast<double>(e.budget_bytes) || !e.fits) return std::nullopt;
  return Notice{"fragmentation",
                fmt::format("fits by capacity at {:.0f} % allocated; if it still runs out of memory that is fragmentation: first "
                            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then selective modules, then parallelism",
                            100.0 * static_cast<double>(e.peak_bytes) / static_cast<double>(e.budget_bytes))};
}

std::vector<Notice> setting_notices(Workload& w, const Setting& s) {
  std::vector<Notice> out;
  if (s.granularity == Granularity::Full) {
    if (!s.modules.empty()) out.push_back({"full.modules", "full granularity: the module list does nothing"});
    return out;
  }
  bool touches_gdn = false;
  for (const std::string& m : s.modules) {
    const std::int64_t layers = w.layers_with(m);
    touches_gdn = touches_gdn || m.rfind("gdn", 0) == 0;
    if (layers == 0) {
      out.push_back({"inert." + m, fmt::format("{} does nothing here: {}", m, why_inert(w, m))});
    } else if (m == "core_attn" && w.run().fused_attention) {
      out.push_back({"inert.core_attn",
                     fmt::format("core_attn touches {} and frees next to nothing: fused attention keeps only its "
                                 "log-sum-exp, and its forward runs again", layers_of(w, layers))});
    }
    for (const std::string& outer : s.modules)
      if (outer != m && w.lies_inside(m, outer))
        out.push_back({"nested." + m, fmt::format("{} lies inside {}: together they keep no less, and its replay is paid again", m, outer)});
  }
  std::int64_t gdn_layers = 0;
  for (config::LayerKind k : w.model().mixers) gdn_layers += k == config::LayerKind::Gdn || k == config::LayerKind::Gdn2;
  const bool hopeful = std::any_of(out.begin(), out.end(), [](const Notice& n) { return n.key.rfind("inert.", 0) == 0; });
  if (hopeful && gdn_layers > 0 && !touches_gdn)
    out.push_back({"untouched.gdn", fmt::format("nothing listed touches the {} GDN mixers", gdn_layers)});
  return out;
}

// ----------------------------------------------------------------------------------------- plan ----

namespace {

// Marks candidates for which another one is at least as good in both memory and time.
void mark_dominated(std::vector<Candidate>& candidates) {
  auto fewer = [](const Candidate& a, const Candidate& b) {
    return a.estimate.setting.modules.size() < b.estimate.setting.modules.size();
  };
  for (Candidate& c : candidates)
    for (const Candidate& other : candidates) {
      if (&other == &c || (other.hypothetical && !c.hypothetical)) continue;
      const Bytes a = other.estimate.peak_bytes, b = c.estimate.peak_bytes;
      const Seconds x = other.estimate.step_seconds, y = c.estimate.step_seconds;
      const bool equal = a == b && x == y;
      if ((a <= b && x <= y && !equal) || (equal && (fewer(other, c) || (!fewer(c, other) && &other < &c)))) {
        c.dominated = true;
        break;
      }
    }
}

void order(std::vector<Candidate>& candidates) {
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    const Estimate &x = a.estimate, &y = b.estimate;
    if (x.fits != y.fits) return x.fits;
    if (!x.fits) return x.peak_bytes < y.peak_bytes;
    if (x.tokens_per_second != y.tokens_per_second) return x.tokens_per_second > y.tokens_per_second;
    if (x.peak_bytes != y.peak_bytes) return x.peak_bytes < y.peak_bytes;
    return x.setting.modules.size() < y.setting.modules.size();
  });
}

std::optional<Proposal> propose(const std::vector<Candidate>& candidates, const config::Run& run) {
  for (const Candidate& c : candidates) {
    if (!c.estimate.fits || c.hypothetical) continue;
    Proposal p{c.estimate.setting, megatron_flags(c.estimate.setting), ""};
    const Revision base{run.revision.base, {}};
    std::vector<std::string> needs;
    for (const std::string& m : p.setting.modules)
      if (run.stack == "megatron" && !model::offers(base, model::parse_module(m).name)) needs.push_back(m);
    if (run.stack == "megatron" && run.l2norm == config::L2Norm::Kernel)
      p.revision_note = fmt::format("the L2 norm inside the rule kernel needs revision {}; ", run.revision.text());
    if (!needs.empty())
      p.revision_note += fmt::format("{} needs revision {} (plain {} does not have it)", fmt::join(needs, ", "),
                                    run.revision.text(), run.revision.base);
    return p;
  }
  return std::nullopt;
}

} // namespace

Overrun overrun_of(const Estimate& e) {
  Overrun o{e.total_bytes - e.budget_bytes, e.setting.text(), ""};
  const Bytes state = e.categories[Category::Parameters] + e.categories[Category::Gradients] + e.categories[Category::Optimizer];
  const Bytes experts = e.worst_rank().state.expert.total();
  Bytes outside = 0;
  for (const OutsideRow& row : e.outside) outside += row.bytes;
  if (state + outside > e.budget_bytes || (e.worst_rank().peak_phase != "loss" && state > e.budget_bytes * 3 / 4))
    o.lever = experts > state / 2
                  ? "static state (experts): more expert parallelism, more pipeline stages, or more GPUs; no recompute module can help"
                  : "static state: more tensor or pipeline parallelism, bf16 gradients, or more GPUs; no recompute module can help";
  else if (e.worst_rank().peak_phase == "loss")
    o.lever = "logits: a fused linear (chunked) cross entropy, tensor parallelism, or fewer tokens per micro-batch";
  else
    o.lever = "tokens per GPU: a smaller micro-batch, or context parallelism";
  return o;
}

namespace {

Overrun smallest_overrun(const std::vector<Candidate>& candidates) {
  const Candidate* best = nullptr;
  for (const Candidate& c : candidates)
    if (!best || c.estimate.total_bytes < best->estimate.total_bytes) best = &c;
  return overrun_of(best->estimate);
}

void plan_notices(Plan& plan, Workload& w) {
  const config::Run& run = w.run();
  // Offered by the revision, nothing to act on.
  if (run.stack == "megatron") {
    std::vector<std::string> inert;
    for (const std::string& m : model::offered_modules(run.revision))
      if (w.layers_with(m) == 0) {
        if (model::find_module(m)->inert) inert.push_back(m);
        else plan.notices.push_back({"inert." + m, fmt::format("{} does nothing here: {}", m, why_inert(w, m))});
      }
    if (!inert.empty())
      plan.notices.push_back({"inert.other", fmt::format("{} belong to other architectures and do nothing here", fmt::join(inert, ", "))});
    if (w.layers_with("core_attn") > 0 && run.fused_attention)
      plan.notices.push_back({"inert.core_attn", fmt::format("core_attn touches {} and is already fused: it frees only the log-sum-exp",
                                                              layers_of(w, w.layers_with("core_attn")))});
    const std::vector<std::string> acting = acting_modules(w, false);
    for (const std::string& inner : acting)
      for (const std::string& outer : acting)
        if (inner != outer && !conflict({inner, outer}) && w.lies_inside(inner, outer))
          plan.notices.push_back({"nested." + inner, fmt::format("{} lies inside {}: together they keep no less", inner, outer)});
  }
  // A superset whose peak is higher than a subset's.
  const Candidate *low = nullptr, *high = nullptr;
  for (const Candidate& a : plan.candidates)
    for (const Candidate& b : plan.candidates) {
      const auto &x = a.estimate.setting, &y = b.estimate.setting;
      if (x.granularity == Granularity::Full || y.granularity == Granularity::Full || x.modules.size() >= y.modules.size()) continue;
      if (a.estimate.peak_bytes >= b.estimate.peak_bytes) continue;
      if (!std::all_of(x.modules.begin(), x.modules.end(), [&](const std::string& m) {
            return std::find(y.modules.begin(), y.modules.end(), m) != y.modules.end(); })) continue;
      const Bytes gap = b.estimate.peak_bytes - a.estimate.peak_bytes;
      if (!low || gap > high->estimate.peak_bytes - low->estimate.peak_bytes) low = &a, high = &b;
    }
  if (low)
    plan.notices.push_back({"higher_peak", fmt::format("{} peaks {} higher than {}: {}", high->estimate.setting.text(),
                                                        format_bytes(high->estimate.peak_bytes - low->estimate.peak_bytes),
                                                        low->estimate.setting.text(), high->estimate.worst_rank().peak_event)});
  // Culprits that no module can move.
  Bytes lowest = plan.candidates.front().estimate.peak_bytes;
  const Estimate* least = &plan.candidates.front().estimate;
  for (const Candidate& c : plan.candidates)
    if (c.estimate.peak_bytes < lowest) lowest = c.estimate.peak_bytes, least = &c.estimate;
  const Bytes state = least->worst_rank().state.total();
  if (state > least->budget_bytes / 2)
    plan.notices.push_back({"culprit.static", fmt::format("static state (parameters, gradients, optimizer) takes {} of {} on rank {}: "
                                                           "no recompute module changes it", format_gib(state),
                                                           format_gib(least->budget_bytes), least->worst)});
  if (least->worst_rank().peak_phase == "loss" && (!least->fits || least->tight || !plan.proposal || plan.proposal->setting.text() != "none"))
    plan.notices.push_back({"culprit.logits", fmt::format("the loss sets the lowest peak ({} of logits): no recompute module changes it; "
                                                           "a fused linear cross entropy, tensor parallelism or fewer tokens do",
                                                           format_gib(least->categories[Category::Logits]))});
  for (Notice& n : unmodelled_notices(w.model(), run)) plan.notices.push_back(std::move(n));
}

} // namespace

Plan make_plan(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
               const PlanOptions& options) {
  const Setting none;
  const auto violations = model::validate(model, none.applied_to(run));
  for (const model::Violation& v : violations)
    if (v.verdict == model::Verdict::Rejected) throw Error(ErrorCode::Config, model::describe(v), "`check` lists every violation");

  Estimator estimator(model, run, hardware, options.budget);
  Plan plan;
  const Estimate base = estimator.evaluate(none);
  std::int64_t impossible = 0;
  for (const Setting& s : legal_settings(estimator.workload(), options.hypothetical)) {
    Candidate c;
    c.hypothetical = is_hypothetical(s, run.stack);
    try {
      c.estimate = estimator.evaluate(s);
    } catch (const Error& e) { // a hypothesis that no order of replays can serve
      if (!c.hypothetical || e.code() != ErrorCode::Config) throw;
      if (impossible++ == 0) plan.notices.push_back({"impossible", fmt::format("{} cannot run: {}", s.text(), e.what())});
      continue;
    }
    c.cost_relative = c.estimate.step_seconds / base.step_seconds - 1;
    plan.candidates.push_back(std::move(c));
  }
  if (impossible > 1) plan.notices.back().text += fmt::format(" ({} settings in all)", impossible);
  order(plan.candidates);
  mark_dominated(plan.candidates);
  for (const Candidate& c : plan.candidates) plan.dominated += c.dominated;
  plan.proposal = propose(plan.candidates, run);
  if (!plan.proposal) plan.overrun = smallest_overrun(plan.candidates);
  if (plan.proposal && !plan.proposal->revision_note.empty()) {
    plan.notices.push_back({"revision", plan.proposal->revision_note});
    config::Run plain = run;
    plain.revision.changes.clear();
    Estimator plain_estimator(model, plain, hardware, options.budget);
    std::vector<Candidate> candidates;
    for (const Setting& s : legal_settings(plain_estimator.workload(), false)) {
      candidates.emplace_back();
      candidates.back().estimate = plain_estimator.evaluate(s);
    }
    order(candidates);
    plan.plain_proposal = propose(candidates, plain);
  }
  plan_notices(plan, estimator.workload());
  if (plan.proposal && run.stack == "megatron")
    for (const Candidate& c : plan.candidates)
      if (c.estimate.setting.text() == plan.proposal->setting.text())
        if (auto notice = fragmentation_notice(c.estimate)) plan.notices.push_back(*notice);
  plan.assumptions = estimator.assumptions();
  return plan;
}

} // namespace gdn::plan
