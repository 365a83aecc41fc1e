#include <iostream>
#include <string_view>

#include "planner/commands/commands.h"
#include "planner/version.h"

namespace {

int run(int argc, char** argv) {
  gdn::cli::Program program("gdnplan", "Which recompute settings to train a Gated-DeltaNet hybrid model with, what each costs, and why.",
                            gdn::planner::version_text());
  for (auto add : {gdn::planner::add_plan, gdn::planner::add_estimate, gdn::planner::add_layer, gdn::planner::add_search, gdn::planner::add_explain,
                   gdn::planner::add_compare, gdn::planner::add_import, gdn::planner::add_check, gdn::planner::add_profiles})
    program.add(add);
  // "import -- ARGUMENTS": everything that import does not know is its source anyway.
  if (argc > 2 && std::string_view(argv[1]) == "import" && std::string_view(argv[2]) == "--") {
    argv[2] = argv[1];
    ++argv;
    --argc;
  }
  const auto choice = program.parse(argc, argv, std::cout);
  return choice ? choice->run() : 0;
}

} // namespace

int main(int argc, char** argv) {
  return gdn::cli::reporting("gdnplan", [&] { return run(argc, argv); });
}
