#pragma once
#include <span>

#include "reference/view.h"

// Packed sequences. A dense batch is 0, T, 2T, ... (batch-major). Sequences of length 0 are legal
// and contribute nothing: their final state is their initial state.
namespace gdn::reference {

// Offsets into the rows, N + 1 of them for N sequences.
using Sequences = std::span<const int64>;

enum class Coverage { Exact, AtMost };

// Throws Error{Config} unless the offsets start at 0, never decrease, and end at `rows` (Exact) or
// at most there (AtMost: rows past the end are padding, whose outputs and gradients are zeros).
void check_sequences(Sequences sequences, int64 rows, Coverage coverage = Coverage::AtMost);

inline int64 sequence_count(Sequences s) {
  return s.empty() ? 0 : static_cast<int64>(s.size()) - 1;
}

// Sum over sequences of ceil(length / chunk): chunks restart at every sequence.
int64 chunk_count(Sequences sequences, int64 chunk);

} // namespace gdn::reference
