#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include <fmt/format.h>

#include "core/error.h"
#include "trainer/comm/launch.h"
#include "trainer/commands/commands.h"

namespace {

int report(const gdn::Error& e) {
  fmt::print(stderr, "gdntrain: error: {}\n", e.what());
  if (!e.hint().empty()) fmt::print(stderr, "  {}\n", e.hint());
  return gdn::exit_status(e.code());
}

int run(int argc, char** argv) {
  CLI::App program{"Runs the programs that gdnplan counts, and checks its predictions.", "gdntrain"};
  program.set_version_flag("--version", GDN_VERSION);
  program.require_subcommand(1);
  struct Command {
    CLI::App* app;
    gdn::trainer::Runner run;
  };
  std::vector<Command> commands;
  for (auto add : {gdn::trainer::add_run, gdn::trainer::add_sweep, gdn::trainer::add_check, gdn::trainer::add_bench, gdn::trainer::add_calibrate}) {
    gdn::trainer::Runner runner = add(program);
    commands.push_back({program.get_subcommands([](CLI::App*) { return true; }).back(), std::move(runner)});
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) { // help and version end 0, every other parse error 2
    if (gdn::trainer::launched_rank() > 0) return e.get_exit_code() == 0 ? 0 : 2; // the first rank says it
    return program.exit(e, std::cout, std::cerr) == 0 ? 0 : 2;
  }
  for (const Command& c : commands)
    if (c.app->parsed())
      return gdn::trainer::run_ranks([&](gdn::trainer::World& world) {
        if (world.size() > 1 && c.app->get_name() != "run")
          throw gdn::Error(gdn::ErrorCode::Usage, fmt::format("gdntrain {} runs on one rank, but {} were started", c.app->get_name(), world.size()));
        return c.run();
      });
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
