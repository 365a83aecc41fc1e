#pragma once
#include "config/profile.h"
#include "plan/plan.h"
#include "planner/options.h"

// Plans and estimates in the forms every command shares.
namespace gdn::planner {

// schema, model, hardware, stack, build, revision, modules: how every JSON output begins.
Json json_head(const char* schema, const Case& c, const std::string& modules);
Json json_assumptions(const std::vector<cost::Assumption>& assumptions);
Json json_notices(const std::vector<plan::Notice>& notices);
Json json_categories(const CategoryBytes& categories);
Json json_throughput(const plan::Estimate& e);

// "Qwen... on 8 x h200: tp 1, ..., micro-batch 1 x 4096, global batch 512 (published: ...)"
void add_run(report::Document& d, const Case& c);
void add_notices(report::Document& d, const std::vector<plan::Notice>& notices);
void add_assumptions(report::Document& d, const std::vector<cost::Assumption>& assumptions);

// Who predicted what, for the head of a gdn.profile/1.
config::Profile profile_identity(const Case& c);
config::Profile make_profile(const Case& c, const std::vector<plan::Estimate>& estimates, plan::Estimator* layers);

// Throws Error{Config} with the first rule that the run breaks under `setting`, or Error{Usage} for a user
// span whose ops no layer has.
void require_legal(const Case& c, const plan::Setting& setting);

std::string percent(double share, int decimals = 1); // "+3.1 %"

} // namespace gdn::planner
