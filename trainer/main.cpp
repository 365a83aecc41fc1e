#include <iostream>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/launch.h"
#include "trainer/commands/commands.h"

namespace {

using gdn::Error, gdn::ErrorCode;

int run(int argc, char** argv) {
  gdn::cli::Program program("gdntrain", "Runs the programs that gdnplan counts, and checks its predictions.", GDN_VERSION);
  for (auto add : {gdn::trainer::add_run, gdn::trainer::add_sweep, gdn::trainer::add_check, gdn::trainer::add_bench, gdn::trainer::add_calibrate})
    program.add(add);
  const bool first = gdn::trainer::launched_rank() == 0; // it speaks for all
  std::ostream nowhere(nullptr);
  std::optional<gdn::cli::Program::Choice> choice;
  try {
    choice = program.parse(argc, argv, first ? std::cout : nowhere);
  } catch (const Error& e) {
    if (first) throw;
    return gdn::exit_status(e.code());
  }
  if (!choice) return 0;
  const int ranks = gdn::trainer::launched_ranks();
  if (ranks > 1 && choice->command != "run" && choice->command != "calibrate") {
    if (!first) return gdn::exit_status(ErrorCode::Usage);
    throw Error(ErrorCode::Usage, fmt::format("gdntrain {} runs on one rank, but {} were started", choice->command, ranks),
                "start it without mpirun or srun; run and calibrate work with many ranks");
  }
  return gdn::trainer::run_ranks([&](gdn::trainer::World&) { return choice->run(); });
}

} // namespace

int main(int argc, char** argv) {
  return gdn::cli::reporting("gdntrain", [&] { return run(argc, argv); });
}
