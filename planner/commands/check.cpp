#include <algorithm>

#include <fmt/core.h>

#include "model/validate.h"
#include "planner/commands/commands.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

struct CheckCommand {
  ModelOptions model;
  OutputOptions output;

  int run() {
    const Case c = load(model);
    const std::vector<model::Violation> violations = model::validate(c.profile.model, c.profile.run);
    const bool rejected = model::any_rejected(violations) ||
                          std::any_of(violations.begin(), violations.end(), [](const model::Violation& v) { return v.rule == "plan.hypothetical"; });
    Output out;
    report::Document& d = out.text;
    add_run(d, c);
    d.heading(violations.empty() ? "No rule is broken" : fmt::format("{} finding{}, in the order the stack meets them", violations.size(), violations.size() == 1 ? "" : "s"));
    for (const model::Violation& v : violations)
      d.line("- " + model::describe(v) + (v.verdict == model::Verdict::Tolerated ? " [the stack refuses it; a plan can go on]" : ""),
             v.verdict == model::Verdict::Rejected ? report::Tone::Bad : report::Tone::Warn, 2);
    d.line(rejected ? "rejected" : "accepted", rejected ? report::Tone::Bad : report::Tone::Good, 2);
    out.json = [&] {
      Json j = json_head("gdnplan.check/1", c, plan::Setting::of(c.profile.run).text());
      j["accepted"] = !rejected;
      Json list = Json::array();
      for (const model::Violation& v : violations)
        list.push_back({{"rule", v.rule}, {"exception", std::string(model::name_of(v.exception))},
                        {"verdict", v.verdict == model::Verdict::Rejected ? "rejected" : v.verdict == model::Verdict::Tolerated ? "tolerated" : "warned"},
                        {"key", v.key}, {"value", v.value}, {"message", v.message}, {"allowed", v.allowed}, {"hint", v.hint}});
      j["violations"] = std::move(list);
      j["assumptions"] = Json::array();
      j["notices"] = Json::array();
      return j;
    };
    write(out, output);
    return rejected ? 2 : 0;
  }
};

} // namespace

cli::Runner add_check(cli::Command& program) {
  auto command = std::make_shared<CheckCommand>();
  cli::Command app = program.subcommand("check", "validation only: every rule of the target stack that a configuration breaks");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json"});
  app.footer("Example: gdnplan check qwen3.5-397b-a17b --pp 8\nExit: 0 accepted, 2 rejected");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
