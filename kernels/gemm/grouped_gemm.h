#pragma once
#include "kernels/common/matrix.h"

// Products of experts: rows offsets[e] .. offsets[e + 1] of the row matrices belong to expert e. The
// offsets stay in device memory. bf16, fp32 accumulation; addresses and row strides are multiples of 16
// bytes. Every result is bitwise repeatable.
namespace gdn::kernels {

struct Groups {
  int experts = 0;
  const std::int32_t* offsets = nullptr; // [experts + 1], ascending; rows behind the last are nobody's
};

// y[rows of e] (+)= x[rows of e] w_e^T: x [rows, in], w [experts * out, in], y [rows, out].
void grouped_forward(const Groups& groups, const Matrix& x, const Matrix& w, const Gradient& y, const LaunchContext& context);
// dx[rows of e] (+)= dy[rows of e] w_e.
void grouped_dgrad(const Groups& groups, const Matrix& dy, const Matrix& w, const Gradient& dx, const LaunchContext& context);
// dw_e += dy[rows of e]^T x[rows of e]; dw [experts * out, in] fp32, contiguous.
void grouped_wgrad(const Groups& groups, const Matrix& dy, const Matrix& x, const Matrix& dw, const LaunchContext& context);

inline constexpr int kMaxExperts = 1024;

} // namespace gdn::kernels
