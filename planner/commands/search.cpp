#include <fmt/core.h>

#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/layouts.h"
#include "planner/page.h"
#include "planner/progress.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

constexpr size_t kShownCandidates = 16; // rows of the front before --all

struct SearchCommand {
  ModelOptions model;
  OutputOptions output;
  std::string solve;
  bool optimizer_options = false, all = false;

  int run() {
    refuse_keys(model, {"tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
                        "expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size", "recompute_modules", "recompute_granularity"},
                "a search chooses it", "`plan` and `estimate` take it as given");
    const Case c = load(model);
    if (!solve.empty()) return run_solve(c, solve, plan::Freedom::Search, output);
    plan::SearchOptions options;
    options.budget = c.budget;
    options.optimizer_options = optimizer_options;
    plan::Search s;
    {
      Progress progress;
      options.progress = [&](double share, const char* what) { progress(share, what); };
      s = plan::search(c.profile.model, c.profile.run, c.hardware, options);
    }
    Output out;
    out.text = text(c, s);
    out.json = [&] { return json(c, s); };
    out.csv = [&] { return csv(s); };
    if (!s.front.empty()) {
      out.svg = [&] { return front_figure(s); };
      out.html = [&] { return make_page(c, s, out.text); };
    }
    out.yaml = [&] {
      if (s.front.empty()) throw Error(ErrorCode::DoesNotFit, "nothing fits: there is no run to write");
      return yaml_layout(s.front.front().run, fmt::format("gdnplan search on {} x {}, {} candidates", c.profile.run.parallel.gpus,
                                                          c.hardware.name, format_count(s.counts.candidates)));
    };
    write(out, output);
    return s.front.empty() ? 3 : 0;
  }

  report::Document text(const Case& c, const plan::Search& s) const {
    report::Document d;
    const config::Run& r = c.profile.run;
    d.pairs({{"model", c.profile.model.name},
             {"GPUs", fmt::format("{} x {}", r.parallel.gpus, c.hardware.name)},
             {"batch", fmt::format("{} sequences of {} tokens a step", format_count(r.global_batch), format_count(r.seq))}});
    d.heading(fmt::format("{} candidates", format_count(s.counts.candidates)));
    d.line(fmt::format("{} legal layouts (TP x PP x VPP x CP x EP x ETP x micro-batch{}), up to {} recompute settings each",
                       format_count(s.counts.parallel_points), optimizer_options ? " x optimizer" : "", s.counts.settings), report::Tone::Plain, 2);
    report::Table counts{"counts", {{"candidates", report::Align::Right}, {"what settled them", report::Align::Left, true}}};
    auto row = [&](std::int64_t n, const char* what) { counts.rows.push_back({format_count(n), what}); };
    row(s.counts.static_state, "parameters, gradients and optimizer alone are over the budget");
    row(s.counts.memory_bound, "the lower bound of the peak is over the budget");
    row(s.counts.dominated, "another one, priced exactly, is no slower and needs no more than their bounds");
    if (s.counts.illegal > 0) row(s.counts.illegal, "pricing met an error");
    row(s.counts.evaluated, "priced exactly");
    d.table(std::move(counts));
    if (s.front.empty()) {
      d.heading("Nothing fits");
      if (s.overrun) {
        d.line(fmt::format("the smallest need found is {} over the budget ({})", format_gib(s.overrun->bytes), s.overrun->setting), report::Tone::Bad, 2);
        d.line("first lever: " + s.overrun->lever, report::Tone::Plain, 2);
      } else {
        d.line("every candidate is over the budget by its lower bound: more GPUs, or a larger budget", report::Tone::Bad, 2);
      }
      return d;
    }
    const Bytes budget = s.front.front().estimate.budget_bytes;
    d.heading(fmt::format("Fastest for its memory, within {}", format_gib(budget)));
    report::Table t{"front", {{"tokens/s", report::Align::Right}, {"peak", report::Align::Right}, {"margin", report::Align::Right},
                              {"layout", report::Align::Left, true}, {"recompute", report::Align::Left, true}}};
    // One row for every 3 % less memory.
    Bytes last = 0;
    for (const plan::SearchPoint& p : s.front) {
      const plan::Estimate& e = p.estimate;
      if (!all && last > 0 && (e.peak_bytes * 100 > last * 97 || t.rows.size() >= kShownCandidates)) continue;
      last = e.peak_bytes;
      const report::Tone tone = e.tight ? report::Tone::Warn : report::Tone::Plain;
      t.rows.push_back({format_count(static_cast<std::int64_t>(e.tokens_per_second)), {format_gib(e.peak_bytes), tone},
                        {format_gib(e.margin()), tone}, layout_text(p.run, optimizer_options), e.setting.text()});
    }
    const size_t shown = t.rows.size();
    d.table(std::move(t));
    if (shown < s.front.size())
      d.line(fmt::format("{} of {} points of the front (--all lists every one)", shown, s.front.size()), report::Tone::Dim, 2);
    d.heading(fmt::format("Best: {}; recompute {}", layout_text(s.front.front().run, optimizer_options), s.front.front().estimate.setting.text()));
    add_layout(d, c.profile.model, s.front.front().run, s.front.front().estimate);
    d.line("--format yaml writes it as a run file for --run", report::Tone::Dim, 2);
    add_assumptions(d, s.assumptions);
    return d;
  }

  static report::Document csv(const plan::Search& s) {
    report::Document d;
    report::Table t{"front", {{"tokens_per_second"}, {"peak_bytes"}, {"total_bytes"}, {"tp"}, {"cp"}, {"pp"}, {"vp"}, {"ep"}, {"etp"},
                              {"micro_batch"}, {"setting"}}};
    auto n = [](auto x) { return fmt::format("{}", x); };
    for (const plan::SearchPoint& p : s.front) {
      const config::Parallel& q = p.run.parallel;
      t.rows.push_back({n(p.estimate.tokens_per_second), n(p.estimate.peak_bytes), n(p.estimate.total_bytes), n(q.tp), n(q.cp), n(q.pp),
                        n(q.vp), n(q.ep), n(q.etp), n(p.run.micro_batch), p.estimate.setting.text()});
    }
    d.table(std::move(t));
    return d;
  }

  static Json json(const Case& c, const plan::Search& s) {
    Json j = json_head("gdnplan.search/1", c, s.front.empty() ? "" : s.front.front().estimate.setting.text());
    j["counts"] = {{"layouts", s.counts.parallel_points}, {"settings", s.counts.settings}, {"candidates", s.counts.candidates},
                   {"static_state", s.counts.static_state}, {"memory_bound", s.counts.memory_bound},
                   {"dominated", s.counts.dominated}, {"illegal", s.counts.illegal}, {"evaluated", s.counts.evaluated}};
    Json front = Json::array();
    for (const plan::SearchPoint& p : s.front) front.push_back(json_layout(c.profile.model, p.run, p.estimate));
    j["best"] = front.empty() ? Json(nullptr) : front.front();
    j["front"] = std::move(front);
    j["overrun"] = s.overrun ? Json{{"bytes", s.overrun->bytes}, {"setting", s.overrun->setting}, {"lever", s.overrun->lever}} : Json(nullptr);
    j["assumptions"] = json_assumptions(s.assumptions);
    j["notices"] = Json::array();
    return j;
  }
};

} // namespace

cli::Runner add_search(cli::Command& program) {
  auto command = std::make_shared<SearchCommand>();
  cli::Command app = program.subcommand("search", "every layout of the GPUs with every recompute setting: the fastest for its memory");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json", "csv", "yaml", "html", "svg"});
  app.option("--solve", command->solve, kSolveHelp);
  app.flag("--optimizer-options", command->optimizer_options, "also bf16 gradients and the precision-aware optimizer");
  app.flag("--all", command->all, "list every point of the front");
  app.footer("Example: gdnplan search qwen3.5-397b-a17b --hardware h200 --gpus 256 --global-batch 1024\nExit: 0 something fits, 3 nothing fits");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
