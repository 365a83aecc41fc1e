#include <cstdio>
#include <exception>
#include <new>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/usage.h"
#include "planner/version.h"
#include "report/document.h"

namespace {

int report(const gdn::Error& e) {
  gdn::report::Document d;
  d.line(std::string("gdnplan: error: ") + e.what());
  if (!e.hint().empty()) d.line(e.hint(), gdn::report::Tone::Plain, 2);
  fmt::print(stderr, "{}", gdn::report::render_text(d)); // long lists of what is allowed wrap at 100 columns
  return gdn::exit_status(e.code());
}

int run(int argc, char** argv) {
  CLI::App program{"Which recompute settings to train a Gated-DeltaNet hybrid model with, what each costs, and why.", "gdnplan"};
  program.set_version_flag("--version", gdn::planner::version_text());
  program.require_subcommand(1);
  program.fallthrough(false);
  struct Command { CLI::App* app; gdn::planner::Runner run; };
  std::vector<Command> commands;
  auto add = [&](gdn::planner::Runner (*make)(CLI::App&)) {
    gdn::planner::Runner runner = make(program);
    commands.push_back({program.get_subcommands([](CLI::App*) { return true; }).back(), std::move(runner)});
  };
  add(gdn::planner::add_plan);
  add(gdn::planner::add_estimate);
  add(gdn::planner::add_layer);
  add(gdn::planner::add_search);
  add(gdn::planner::add_explain);
  add(gdn::planner::add_compare);
  add(gdn::planner::add_import);
  add(gdn::planner::add_check);
  add(gdn::planner::add_profiles);
  // "import -- ARGUMENTS": everything that import does not know is its source anyway.
  if (argc > 2 && std::string_view(argv[1]) == "import" && std::string_view(argv[2]) == "--") {
    argv[2] = argv[1];
    ++argv;
    --argc;
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    // Help and version end 0; every other parse error is a usage error, on stderr.
    if (e.get_exit_code() != 0) throw gdn::planner::usage_error(e, program);
    return program.exit(e, std::cout, std::cerr);
  }
  for (const Command& c : commands)
    if (c.app->parsed()) return c.run();
  return 2;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const gdn::Error& e) {
    return report(e);
  } catch (const std::bad_alloc&) {
    return report(gdn::Error(gdn::ErrorCode::Internal, "out of host memory"));
  } catch (const std::exception& e) {
    return report(gdn::Error(gdn::ErrorCode::Internal, fmt::format("unexpected: {}", e.what())));
  }
}
