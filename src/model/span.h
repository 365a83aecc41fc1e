#pragma once
#include <string>

namespace gdn::model {

// Whole block: the span runs without recording; its internals are made again before the backward of
// its last op. Discard output: as that, and its outputs are dropped once the hook tensor's producer
// has run, and refilled before that producer's first backward step. A hook inside a span nested at
// the same level is a hook on that span. A span that no gradient passes, and whose outputs nobody's
// backward wants again, is not replayed.
enum class SpanKind { WholeBlock, DiscardOutput };

// What a replay executes: every op of the span (Megatron), or only producers of what backward reads.
enum class ReplayExtent { All, Needed };

// A run of consecutive ops [first, last] of one op list that is executed again in backward.
struct Span {
  std::string name;      // of the module
  int first = 0, last = 0;
  SpanKind kind = SpanKind::WholeBlock;
  int hook = -1;         // DiscardOutput: op whose forward ends the outputs' first life; > last
  ReplayExtent extent = ReplayExtent::All;
  // Megatron's checkpoint objects refer to these until the span's backward has ended: the outputs made
  // again, and (whole block) the gradients that arrived for them, (discard) the arguments and what the
  // replay saved for its backward. Native programs hold nothing.
  bool holds = true;

  friend bool operator==(const Span&, const Span&) = default;
};

} // namespace gdn::model
