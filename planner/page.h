#pragma once
#include "planner/options.h"
#include "plan/plan.h"
#include "report/html.h"

// The pictures of a plan or an estimate, alone (--format svg) or in a page (--format html).
namespace gdn::planner {

// Memory over the step of the fullest rank, by category, its peak marked.
std::string memory_figure(const Case& c, plan::Estimator& estimator, const plan::Estimate& e);
// Memory of every recompute setting beside its speed; `chosen` is marked.
std::string settings_figure(const plan::Plan& plan, const plan::Setting& chosen);

// Title, cards and both figures, then `details` (what the command prints as text).
report::Page make_page(const Case& c, plan::Estimator& estimator, const plan::Estimate& e, const plan::Plan& plan,
                       const report::Document& details);

} // namespace gdn::planner
