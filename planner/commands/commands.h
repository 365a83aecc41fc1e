#pragma once
#include <memory>

#include "cli/program.h"

// One function a command: it adds its subcommand to the program and returns what runs it; the result
// is the exit status of a run that did not throw (0, or 3 where nothing fits, 5 over tolerance).
namespace gdn::planner {

inline constexpr const char* kSolveHelp =
    "seq, micro-batch, gpus or budget: the largest (smallest) that fits instead of the usual answer";

cli::Runner add_plan(cli::Command& program);
cli::Runner add_estimate(cli::Command& program);
cli::Runner add_layer(cli::Command& program);
cli::Runner add_search(cli::Command& program);
cli::Runner add_explain(cli::Command& program);
cli::Runner add_compare(cli::Command& program);
cli::Runner add_import(cli::Command& program);
cli::Runner add_check(cli::Command& program);
cli::Runner add_profiles(cli::Command& program);

} // namespace gdn::planner
