#pragma once
#include "kernels/common/matrix.h"

// The gate of the shared expert: one score a token, x . w.
namespace gdn::kernels {

// score [T, 1] = x . w, or its sigmoid; w [1, h].
void row_score(const Matrix& x, const Matrix& w, bool with_sigmoid, const Matrix& score, const LaunchContext& context);
// d_score [T, 1] fp32 of the product before the sigmoid, from the gradient of the sigmoid.
void row_score_backward(const Matrix& sigmoid, const Matrix& d_sigmoid, const Matrix& d_score, const LaunchContext& context);

// y = x * sigmoid(score of the row); d_score [T, 1] is written.
void row_gate_forward(const Matrix& x, const Matrix& score, const Matrix& y, const LaunchContext& context);
void row_gate_backward(const Matrix& x, const Matrix& score, const Matrix& dy, const Gradient& dx, const Matrix& d_score,
                       const LaunchContext& context);

// to [T, h] (+)= a [T, 1] b [1, h].
void outer(const Matrix& a, const Matrix& b, const Gradient& to, const LaunchContext& context);

} // namespace gdn::kernels
