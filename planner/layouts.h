#pragma once
#include "planner/options.h"
#include "plan/solve.h"

// Answers that are a whole layout: what search and --solve print about one.
namespace gdn::planner {

// "TP 2, PP 4, VP 2, EP 8, micro-batch 1"; `optimizer`: and what gradients and states are stored in.
std::string layout_text(const config::Run& run, bool optimizer = false);
void add_layout(report::Document& d, const config::Model& model, const config::Run& run, const plan::Estimate& e); // throughput, memory, flags to paste
Json json_layout(const config::Model& model, const config::Run& run, const plan::Estimate& e);
std::string yaml_layout(const config::Run& run, const std::string& why); // a file for --run

// --solve of a command: solves, writes, and returns the exit status (0, or 3 where no value fits).
int run_solve(const Case& c, const std::string& unknown, plan::Freedom freedom, const OutputOptions& output);

} // namespace gdn::planner
