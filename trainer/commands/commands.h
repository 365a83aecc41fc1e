#pragma once
#include <memory>

#include "cli/program.h"

namespace gdn::trainer {

// Each adds a command to the program; what it returns runs it and gives the exit status.
cli::Runner add_run(cli::Command& program);
cli::Runner add_sweep(cli::Command& program);
cli::Runner add_check(cli::Command& program);
cli::Runner add_bench(cli::Command& program);
cli::Runner add_calibrate(cli::Command& program);

} // namespace gdn::trainer
