#pragma once
#include "planner/options.h"
#include "plan/search.h"
#include "report/html.h"

// The pictures of a plan or an estimate, alone (--format svg) or in a page (--format html).
namespace gdn::planner {

// Memory over the step of the fullest rank, by category, its peak marked.
std::string memory_figure(const Case& c, plan::Estimator& estimator, const plan::Estimate& e);
// Memory of every recompute setting beside its speed; `chosen` is marked.
std::string settings_figure(const plan::Plan& plan, const plan::Setting& chosen);

// The front of a search: memory of every layout on it beside its speed, the fastest marked.
std::string front_figure(const plan::Search& search);

// Title, cards and both figures, then `details` (what the command prints as text).
report::Page make_page(const Case& c, plan::Estimator& estimator, const plan::Estimate& e, const plan::Plan& plan,
                       const report::Document& details);
// The same for the best of a search that found one.
report::Page make_page(const Case& c, const plan::Search& search, const report::Document& details);

} // namespace gdn::planner
