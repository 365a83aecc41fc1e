#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/run.h"
#include "core/revision.h"
#include "model/span.h"

// The recompute modules that some revision of Megatron-LM knows: names, kinds, availability,
// conflicts. Which ops a module checkpoints is src/model/spans.
namespace gdn::model {

struct Module {
  std::string_view name;
  SpanKind kind;           // in every revision that has it
  bool inert;              // no layer of the GDN family has its ops: accepted, does nothing
  std::string_view covers; // one line
  std::vector<std::string_view> bases; // base trees that have it
  std::string_view change;             // the change that adds it to any base; empty: none
};

const std::vector<Module>& all_modules();
const Module* find_module(std::string_view name); // nullptr when no revision knows it

// Whether the revision's base or changes have the module.
bool offers(const Revision& revision, std::string_view name);
std::vector<std::string> offered_modules(const Revision& revision);
// "dev, or any base with +gdn": for messages about a module of another revision.
std::string where_offered(const Module& module);

// A module as a user writes it: NAME, or NAME:discard for its discard-output form.
struct ModuleName {
  std::string name;
  bool discard = false;
  friend bool operator==(const ModuleName&, const ModuleName&) = default;
};
// Throws Error{Usage} naming an unknown name or kind and the nearest spelling.
ModuleName parse_module(std::string_view text);
SpanKind kind_of(const ModuleName& module); // of a known name

// A discard form of a whole-block module: no revision has it, so it enters a plan only as a
// hypothesis and never appears among flags to paste.
bool is_hypothetical(const ModuleName& module);

// Pairs that the stack refuses to combine, with the row of its rule ("recompute.13").
struct ModuleConflict {
  std::string_view a, b, rule, why;
};
const std::vector<ModuleConflict>& module_conflicts();
const ModuleConflict* find_conflict(std::string_view a,
                                    std::string_view b); // nullptr: may be combined

// What a run recomputes after Megatron-LM's own normalisation: under selective granularity the
// listed modules, or ["core_attn"] when none are given (an empty list stays empty; stack native has no
// such default); else nothing.
// moe_layer_recompute, the deprecated spelling, turns selective on and appends moe.
std::vector<std::string> active_modules(const config::Run& run);
config::Granularity active_granularity(const config::Run& run);

} // namespace gdn::model
