#pragma once
#include "kernels/common/matrix.h"

// Tokens to the rows of their slots and back. row_map [T, k]: row of each slot, negative: none. Sums run over a
// token's slots in order.
namespace gdn::kernels {

// rows[row_map[t, j]] (+)= x[t]; rows of no slot keep what they hold.
void spread_rows(const Matrix& x, const Matrix& row_map, const Gradient& rows, const LaunchContext& context);
// y[t] (+)= sum over j of rows[row_map[t, j]].
void collect_rows(const Matrix& rows, const Matrix& row_map, const Gradient& y, const LaunchContext& context);

} // namespace gdn::kernels
