#pragma once
#include "kernels/common/matrix.h"

// The rows of the experts: a stable counting sort of the slots (token t, choice j), in slot order.
namespace gdn::kernels {

struct SortParams {
  Matrix experts;               // [T, k]
  int count = 0;                // of experts, at most 1024
  std::int64_t capacity = 0;    // rows of every expert, later slots of a full one are dropped; 0: as many as needed
  Matrix row_map;               // [T, k] out: row of each slot, -1 where dropped
  std::int32_t* counts = nullptr;  // [experts] out: slots of each
  std::int32_t* offsets = nullptr; // [experts + 1] out: first row of each
};
void sort_slots(const SortParams& params, const LaunchContext& context);

// counts[e] = slots of expert e.
void count_slots(const Matrix& experts, int count, std::int32_t* counts, const LaunchContext& context);
// to[e] += from[e].
void add_counts(const std::int32_t* from, int count, std::int64_t* to, const LaunchContext& context);

// to's first columns = from; its other columns = 0.
void copy_indices(const Matrix& from, const Matrix& to, const LaunchContext& context);

// A map [T, E] of k chosen experts a token as their numbers [T, k], ascending.
void experts_of_map(const Matrix& map, const Matrix& experts, const LaunchContext& context);

// by_row[row] = by_slot [T, k] of the slot there, or dense [T, E] at the slot's expert; rows that no slot has
// keep what they hold.
void weights_to_rows(const Matrix& row_map, const Matrix& by_slot, const Matrix& dense, const Matrix& experts,
                     const Matrix& by_row, const LaunchContext& context);
// The adjoint: by_slot [T, k] (+)= by_row at the slot's row, 0 where it has none.
void weights_from_rows(const Matrix& row_map, const Matrix& by_row, const Gradient& by_slot, const LaunchContext& context);
// The adjoint for the dense form: dense [T, E] (+)= by_row at the expert's row of the token, 0 elsewhere. Experts of
// the slots are given, or found by their rows in `offsets` [E + 1].
void weights_from_rows_dense(const Matrix& row_map, const Matrix& by_row, const Matrix& experts, const std::int32_t* offsets,
                             const Gradient& dense, const LaunchContext& context);

} // namespace gdn::kernels
