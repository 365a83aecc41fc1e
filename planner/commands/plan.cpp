#include <fmt/core.h>

#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/exploration.h"
#include "planner/layouts.h"
#include "planner/page.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

constexpr size_t kShownSettings = 12; // rows of the table before --all

struct PlanCommand {
  ModelOptions model;
  OutputOptions output;
  std::string solve;
  bool hypothetical = false, all = false, explore = false;

  int run() {
    if (!explore && solve.empty())
      refuse_keys(model, {"recompute_modules", "recompute_granularity"}, "a plan tries every setting", "`estimate`, `layer` and `explain` price one, `plan --explore` goes on from it");
    if (explore && !solve.empty()) throw Error(ErrorCode::Usage, "--explore and --solve are two questions", "one of them");
    const Case c = load(model);
    if (!solve.empty()) return run_solve(c, solve, plan::Freedom::Plan, output);
    require_legal(c, plan::Setting::of(c.profile.run));
    if (explore) return run_explore(c, all, output);
    if (!c.profile.run.recompute.user_spans.empty() && !hypothetical)
      throw Error(ErrorCode::Usage, "--span: a span that no revision offers enters a plan only with --hypothetical",
                  "add --hypothetical, or price it alone with `gdnplan estimate`");
    plan::PlanOptions options;
    options.budget = c.budget;
    options.hypothetical = hypothetical;
    const plan::Plan p = plan::make_plan(c.profile.model, c.profile.run, c.hardware, options);
    Output out;
    out.text = text(c, p);
    out.json = [&] { return json(c, p); };
    out.csv = [&] { return csv(p); };
    out.yaml = [&] {
      std::vector<plan::Estimate> estimates;
      for (const plan::Candidate& k : p.candidates)
        if (all || !k.dominated) estimates.push_back(k.estimate);
      return config::to_yaml(make_profile(c, estimates, nullptr));
    };
    const plan::Setting shown = p.proposal ? p.proposal->setting : p.candidates.front().estimate.setting;
    out.svg = [&] { return settings_figure(p, shown); };
    out.html = [&] {
      plan::Estimator estimator(c.profile.model, c.profile.run, c.hardware, c.budget);
      return make_page(c, estimator, estimator.evaluate(shown), p, out.text);
    };
    write(out, output);
    return p.proposal ? 0 : 3;
  }

  report::Document text(const Case& c, const plan::Plan& p) const {
    report::Document d;
    add_run(d, c);
    const Bytes budget = p.candidates.front().estimate.budget_bytes;
    d.heading(fmt::format("Recompute settings, fastest that fits {} first", format_gib(budget)));
    report::Table t{"plan", {{"modules", report::Align::Left, true}, {"peak", report::Align::Right}, {"margin", report::Align::Right},
                             {"set by", report::Align::Left, true}, {"step", report::Align::Right}, {"cost", report::Align::Right}}};
    std::int64_t hidden = 0;
    for (const plan::Candidate& k : p.candidates) {
      if (k.dominated && !all) continue;
      if (!all && t.rows.size() >= kShownSettings) {
        ++hidden;
        continue;
      }
      const plan::Estimate& e = k.estimate;
      const plan::RankEstimate& w = e.worst_rank();
      const report::Tone tone = !e.fits ? report::Tone::Bad : e.tight ? report::Tone::Warn : report::Tone::Plain;
      t.rows.push_back({e.setting.text() + (k.hypothetical ? " (hypothetical)" : ""), {format_gib(e.peak_bytes), tone},
                        {format_gib(e.margin()) + (e.tight ? " tight" : ""), tone},
                        (e.ranks.size() > 1 ? fmt::format("rank {}, ", w.rank) : "") + w.peak_event,
                        format_seconds(e.step_seconds), percent(k.cost_relative)});
    }
    d.table(std::move(t));
    if (!all && (p.dominated || hidden))
      d.line(fmt::format("{}{} settings are dominated: another is no slower and needs no more (--all lists every one)",
                         hidden ? fmt::format("{} more rows are not shown; ", hidden) : "", p.dominated),
             report::Tone::Dim, 2);
    proposal(d, p, c);
    add_notices(d, p.notices);
    add_assumptions(d, p.assumptions);
    return d;
  }

  void proposal(report::Document& d, const plan::Plan& p, const Case& c) const {
    if (!p.proposal) {
      d.heading("Nothing fits");
      d.line(fmt::format("the smallest need is {} over the budget ({})", format_gib(p.overrun->bytes), p.overrun->setting), report::Tone::Bad, 2);
      d.line("first lever: " + p.overrun->lever, report::Tone::Plain, 2);
      return;
    }
    for (const plan::Candidate& k : p.candidates)
      if (k.estimate.setting.text() == p.proposal->setting.text()) {
        const plan::Estimate& e = k.estimate;
        d.heading(fmt::format("Proposal: {}", e.setting.text()));
        d.line(fmt::format("{} tokens/s ({} a GPU), {:.0f} TFLOP/s a GPU, MFU {:.1f} %; {} of {} with context and allocator",
                           format_count(static_cast<std::int64_t>(e.tokens_per_second)),
                           format_count(static_cast<std::int64_t>(e.tokens_per_second_per_gpu)), e.model_tflops_per_gpu,
                           e.mfu * 100, format_gib(e.total_bytes), format_gib(e.budget_bytes)), report::Tone::Plain, 2);
        if (e.tight) d.line(fmt::format("tight: only {} are left", format_gib(e.margin())), report::Tone::Warn, 2);
        break;
      }
    if (!p.proposal->revision_note.empty()) d.line(p.proposal->revision_note, report::Tone::Warn, 2);
    forms(d, *p.proposal, c);
    if (p.plain_proposal) {
      d.heading(fmt::format("On plain {}: {}", c.profile.run.revision.base, p.plain_proposal->setting.text()));
      forms(d, *p.plain_proposal, c);
    }
  }

  static void forms(report::Document& d, const plan::Proposal& p, const Case& c) {
    if (c.profile.run.stack != "megatron") {
      d.line("in the run file:", report::Tone::Dim, 2);
      d.verbatim(fmt::format("recompute_modules: [{}]", join(p.setting.modules, ", ")), 4);
      return;
    }
    if (p.flags.empty()) {
      d.line("no recompute flags are needed", report::Tone::Dim, 2);
      return;
    }
    d.line("Megatron-LM:", report::Tone::Dim, 2);
    d.verbatim(join(p.flags), 4);
    d.line("Megatron-Bridge / YAML:", report::Tone::Dim, 2);
    d.verbatim(fmt::format("model.recompute_granularity: {}", config::name_of(p.setting.granularity)), 4);
    if (p.setting.granularity == config::Granularity::Full) {
      d.verbatim("model.recompute_method: " + p.setting.method, 4);
      d.verbatim(fmt::format("model.recompute_num_layers: {}", p.setting.num_layers), 4);
    } else {
      d.verbatim(fmt::format("model.recompute_modules: [{}]", join(p.setting.modules, ", ")), 4);
    }
  }

  // Bytes, seconds and truth values of every candidate.
  static report::Document csv(const plan::Plan& p) {
    report::Document d;
    report::Table t{"plan", {{"setting"}, {"peak_bytes"}, {"total_bytes"}, {"margin_bytes"}, {"step_seconds"}, {"tokens_per_second"},
                             {"recompute_seconds"}, {"cost_relative"}, {"fits"}, {"tight"}, {"dominated"}, {"hypothetical"}, {"peak_event"}}};
    auto truth = [](bool b) { return b ? "true" : "false"; };
    for (const plan::Candidate& k : p.candidates) {
      const plan::Estimate& e = k.estimate;
      t.rows.push_back({e.setting.text(), fmt::format("{}", e.peak_bytes), fmt::format("{}", e.total_bytes), fmt::format("{}", e.margin()),
                        fmt::format("{}", e.step_seconds), fmt::format("{}", e.tokens_per_second), fmt::format("{}", e.recompute_seconds),
                        fmt::format("{}", k.cost_relative), truth(e.fits), truth(e.tight), truth(k.dominated), truth(k.hypothetical),
                        e.worst_rank().peak_event});
    }
    d.table(std::move(t));
    return d;
  }

  static Json json(const Case& c, const plan::Plan& p) {
    Json j = json_head("gdnplan.plan/1", c, p.proposal ? p.proposal->setting.text() : "");
    Json candidates = Json::array();
    for (const plan::Candidate& k : p.candidates) {
      const plan::Estimate& e = k.estimate;
      candidates.push_back({{"modules", e.setting.modules}, {"setting", e.setting.text()},
                            {"method", e.setting.method}, {"num_layers", e.setting.num_layers}, {"granularity", std::string(config::name_of(e.setting.granularity))},
                            {"peak_bytes", e.peak_bytes}, {"total_bytes", e.total_bytes},
                            {"peak_phase", e.worst_rank().peak_phase}, {"peak_event", e.worst_rank().peak_event},
                            {"step_seconds", e.step_seconds}, {"tokens_per_second", e.tokens_per_second},
                            {"recompute_seconds", e.recompute_seconds}, {"cost_relative", k.cost_relative},
                            {"fits", e.fits}, {"tight", e.tight}, {"dominated", k.dominated}, {"hypothetical", k.hypothetical}});
    }
    j["budget_bytes"] = p.candidates.front().estimate.budget_bytes;
    j["candidates"] = std::move(candidates);
    auto proposal = [](const std::optional<plan::Proposal>& q) -> Json {
      if (!q) return nullptr;
      return {{"modules", q->setting.modules}, {"setting", q->setting.text()},
              {"granularity", std::string(config::name_of(q->setting.granularity))}, {"flags", q->flags},
              {"revision_note", q->revision_note}};
    };
    j["proposal"] = proposal(p.proposal);
    j["plain_proposal"] = proposal(p.plain_proposal);
    j["overrun"] = p.overrun ? Json{{"bytes", p.overrun->bytes}, {"setting", p.overrun->setting}, {"lever", p.overrun->lever}} : Json(nullptr);
    j["assumptions"] = json_assumptions(p.assumptions);
    j["notices"] = json_notices(p.notices);
    return j;
  }
};

} // namespace

cli::Runner add_plan(cli::Command& program) {
  auto command = std::make_shared<PlanCommand>();
  cli::Command app = program.subcommand("plan", "every legal combination of recompute modules, ranked, and the one to use");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json", "csv", "yaml", "html", "svg"});
  app.option("--solve", command->solve, kSolveHelp);
  app.flag("--hypothetical", command->hypothetical, "also forms that no revision offers, and --span");
  app.flag("--explore", command->explore, "every contiguous span of every layer kind as a checkpoint, beside today's modules");
  app.flag("--all", command->all, "list dominated settings too");
  app.footer("Example: gdnplan plan qwen3.5-35b-a3b --hardware h200 --seq 8192\nExit: 0 something fits, 3 nothing fits");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
