#include <cstdio>
#include <exception>
#include <new>

#include <fmt/format.h>

#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/version.h"

namespace {

int report(const gdn::Error& e) {
  fmt::print(stderr, "gdnplan: error: {}\n", e.what());
  if (!e.hint().empty()) fmt::print(stderr, "  {}\n", e.hint());
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
  add(gdn::planner::add_compare);
  add(gdn::planner::add_import);
  add(gdn::planner::add_check);
  add(gdn::planner::add_profiles);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    // Help and version end 0; every other parse error is a usage error, on stderr.
    const int code = program.exit(e, std::cout, std::cerr);
    return code == 0 ? 0 : 2;
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
