#pragma once
#include <functional>
#include <memory>

#include <CLI/CLI.hpp>

// One function a command: it adds its subcommand to the program and returns what runs it; the result
// is the exit status of a run that did not throw (0, or 3 where nothing fits, 5 over tolerance).
namespace gdn::planner {

using Runner = std::function<int()>;

inline constexpr const char* kSolveHelp =
    "seq, micro-batch, gpus or budget: the largest (smallest) that fits instead of the usual answer";

Runner add_plan(CLI::App& program);
Runner add_estimate(CLI::App& program);
Runner add_layer(CLI::App& program);
Runner add_search(CLI::App& program);
Runner add_explain(CLI::App& program);
Runner add_compare(CLI::App& program);
Runner add_import(CLI::App& program);
Runner add_check(CLI::App& program);
Runner add_profiles(CLI::App& program);

} // namespace gdn::planner
