#pragma once
#include <string>
#include <vector>

#include "config/run.h"
#include "model/op.h"
#include "model/span.h"

namespace gdn::model {

// One recompute module as data: which run of ops it checkpoints and how. A module may have several
// entries (one per place it acts on); entries whose ops a list does not have do nothing there.
struct SpanSpec {
  std::string module;  // "gdn_qkv", "gdn_qkv:discard"
  std::string first, last;  // op names
  SpanKind kind = SpanKind::WholeBlock;
  std::string hook;    // op whose output carries the hook (DiscardOutput)
  bool by_default = false; // native: on unless the module list says "-NAME"
  std::string unless = {}; // an op that makes the entry pointless where a list has it
};

// Megatron-LM's modules (megatron-core recompute_modules, #5283, #5284, #5296, #5982).
const std::vector<SpanSpec>& megatron_spans();
// Native's default spans (cheap rebuilds, on unless switched off by "-NAME"; their replay time is
// counted) and the modules a user may add.
const std::vector<SpanSpec>& native_spans();

// Whether native knows the module: NAME, or "-NAME" of a default span.
bool is_native_module(const std::string& module);
// All of them, as a user may write them: what he adds, then what he switches off.
std::vector<std::string> native_modules();

// Spans of `modules` (names, "NAME:discard") and `user` on one list. `prefix` is that of the layer's
// op names when a list holds several layers ("L03."), else empty. Throws Error{Usage} when a user
// span's first op comes after its last, or native has no such module.
std::vector<Span> spans_for(const OpList& list, const std::vector<std::string>& modules,
                            const std::vector<config::UserSpan>& user, const std::string& stack);

// Full granularity: one whole-block span over the list; native's default spans nest inside it.
std::vector<Span> full_spans(const OpList& list, const std::string& stack);

// Whether module `name` acts on the list.
bool acts_on(const std::string& name, const OpList& list, const std::string& stack);

} // namespace gdn::model
