#pragma once
#include <functional>

#include <CLI/CLI.hpp>

namespace gdn::trainer {

// Adds a command to the program; what it returns runs it and gives the exit status.
using Runner = std::function<int()>;
Runner add_run(CLI::App& program);
Runner add_sweep(CLI::App& program);
Runner add_check(CLI::App& program);
Runner add_bench(CLI::App& program);
Runner add_calibrate(CLI::App& program);

} // namespace gdn::trainer
