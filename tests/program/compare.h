#pragma once
#include <string>

#include "program/summary.h"
#include "tests/program/brute_force.h"
#include "tests/program/toy_lists.h"

namespace gdn::brute {

// Where the engine's trace and levels of a unit alone first differ from its execution: order of
// events, level around each to the byte, gradient modes, retained bytes, peaks and their categories.
// Empty when they agree.
std::string difference(const program::UnitTrace& trace, const std::vector<model::Span>& spans,
                       const Execution& execution);

// Traces and executes; both throwing the same kind of error counts as agreement. `what`, when given,
// receives "ok" or the error's text.
std::string difference(const toy::Case& c, const model::Provider& provider, std::string* what = nullptr);

} // namespace gdn::brute
