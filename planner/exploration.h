#pragma once
#include "planner/options.h"

namespace gdn::planner {

// plan --explore: where today's module boundaries leave something on the table.
int run_explore(const Case& c, bool all, const OutputOptions& output);

} // namespace gdn::planner
