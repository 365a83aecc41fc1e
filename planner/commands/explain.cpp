#include <fmt/core.h>

#include "plan/explain.h"
#include "planner/commands/commands.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

struct ExplainCommand {
  ModelOptions model;
  OutputOptions output;

  int run() {
    const Case c = load(model);
    const plan::Setting setting = plan::Setting::of(c.profile.run);
    require_legal(c, setting);
    const plan::Explanation x = plan::explain(c.profile.model, c.profile.run, c.hardware, setting, c.budget);
    Output out;
    out.text = text(c, x);
    out.json = [&] { return json(c, x); };
    write(out, output);
    return x.with.fits ? 0 : 3;
  }

  static std::string signed_bytes(Bytes b) { return b < 0 ? "-" + format_bytes(-b) : format_bytes(b); }

  static report::Document text(const Case& c, const plan::Explanation& x) {
    report::Document d;
    add_run(d, c);
    d.heading(fmt::format("{}: {} instead of {}, {} a step", x.with.setting.text(), format_gib(x.with.peak_bytes),
                          format_gib(x.without.peak_bytes), percent(x.with.step_seconds / x.without.step_seconds - 1)));
    for (const std::string& f : x.findings) d.line("- " + f, report::Tone::Plain, 2);
    if (!x.modules.empty()) {
      d.heading("What each module does");
      report::Table t{"modules", {{"module"}, {"layers", report::Align::Right}, {"retained freed", report::Align::Right},
                                  {"peak, alone", report::Align::Right}, {"peak, left out", report::Align::Right}, {"replay", report::Align::Right}}};
      for (const plan::ModuleEffect& m : x.modules)
        t.rows.push_back({m.module, fmt::format("{}", m.layers), signed_bytes(m.promised), signed_bytes(-m.alone),
                          m.marginal < 0 ? signed_bytes(m.marginal) : "+" + format_bytes(m.marginal), format_seconds(m.replay)});
      d.table(std::move(t));
      for (const plan::ModuleEffect& m : x.modules)
        for (const std::string& r : m.reasons) d.line(fmt::format("- {}: {}", m.module, r), report::Tone::Plain, 2);
    }
    levers(d, x, true, "What would lower the peak: recompute");
    levers(d, x, false, "What would lower the peak: the run");
    add_assumptions(d, x.assumptions);
    return d;
  }

  static void levers(report::Document& d, const plan::Explanation& x, bool recompute, const char* title) {
    report::Table t{recompute ? "recompute" : "run", {{"change", report::Align::Left, true}, {"peak", report::Align::Right}, {"freed", report::Align::Right},
                                                      {"step", report::Align::Right}, {"then set by", report::Align::Left, true}}};
    for (const plan::Lever& l : x.levers)
      if (l.recompute == recompute)
        t.rows.push_back({l.change, format_gib(l.estimate.peak_bytes), format_gib(l.freed), percent(l.cost),
                          (l.estimate.ranks.size() > 1 ? fmt::format("rank {}, ", l.estimate.worst_rank().rank) : "") + l.estimate.worst_rank().peak_event});
    d.heading(title);
    if (t.rows.empty()) d.line("nothing that is legal here", report::Tone::Dim, 2);
    else d.table(std::move(t));
  }

  static Json json(const Case& c, const plan::Explanation& x) {
    Json j = json_head("gdnplan.explain/1", c, x.with.setting.text());
    auto side = [](const plan::Estimate& e) {
      return Json{{"peak_bytes", e.peak_bytes}, {"step_seconds", e.step_seconds}, {"rank", e.worst}, {"phase", e.worst_rank().peak_phase},
                  {"event", e.worst_rank().peak_event}, {"largest", e.worst_rank().largest}, {"fits", e.fits}};
    };
    j["without"] = side(x.without);
    j["with"] = side(x.with);
    j["findings"] = x.findings;
    Json modules = Json::array(), levers = Json::array();
    for (const plan::ModuleEffect& m : x.modules)
      modules.push_back({{"module", m.module}, {"layers", m.layers}, {"retained_freed_bytes", m.promised}, {"peak_alone_bytes", m.alone},
                         {"peak_marginal_bytes", m.marginal}, {"replay_seconds", m.replay}, {"reasons", m.reasons}});
    for (const plan::Lever& l : x.levers)
      levers.push_back({{"change", l.change}, {"peak_bytes", l.estimate.peak_bytes}, {"freed_bytes", l.freed}, {"cost_relative", l.cost},
                        {"recompute", l.recompute}, {"event", l.estimate.worst_rank().peak_event}});
    j["modules_effect"] = std::move(modules);
    j["levers"] = std::move(levers);
    j["assumptions"] = json_assumptions(x.assumptions);
    j["notices"] = Json::array();
    return j;
  }
};

} // namespace

cli::Runner add_explain(cli::Command& program) {
  auto command = std::make_shared<ExplainCommand>();
  cli::Command app = program.subcommand("explain", "why a setting does less than hoped, what sets the peak, what would move it");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json"});
  app.footer("Example: gdnplan explain qwen3.5-35b-a3b --modules core_attn,moe_act\nExit: 0 fits, 3 does not fit");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
