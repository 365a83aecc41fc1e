#pragma once
#include "kernels/common/matrix.h"

// Moves and pointwise functions; matrices of one call have the same rows and columns unless noted,
// bf16 or fp32 each.
namespace gdn::kernels {

// to (+)= from.
void copy(const Matrix& from, const Gradient& to, const LaunchContext& context);
// y = a + b.
void add(const Matrix& a, const Matrix& b, const Matrix& y, const LaunchContext& context);
// to (+)= factor x; with `by_row` [rows, 1], row i is multiplied by it as well.
void scale(float factor, const Matrix& x, const Matrix& by_row, const Gradient& to, const LaunchContext& context);
// Every element (+)= value.
void fill(const Gradient& to, float value, const LaunchContext& context);

// y = x sigmoid(x), and its gradient from x.
void silu_forward(const Matrix& x, const Matrix& y, const LaunchContext& context);
void silu_backward(const Matrix& x, const Matrix& dy, const Gradient& dx, const LaunchContext& context);

// y = x sigmoid(gate). Either gradient may be absent.
void sigmoid_gate_forward(const Matrix& x, const Matrix& gate, const Matrix& y, const LaunchContext& context);
void sigmoid_gate_backward(const Matrix& x, const Matrix& gate, const Matrix& dy, const Gradient& dx,
                           const Gradient& dgate, const LaunchContext& context);

// y = x silu(z), and its gradients.
void silu_gate_forward(const Matrix& x, const Matrix& z, const Matrix& y, const LaunchContext& context);
void silu_gate_backward(const Matrix& x, const Matrix& z, const Matrix& dy, const Gradient& dx, const Gradient& dz,
                        const LaunchContext& context);

// Heads of `width` columns, each repeated `repeat` times: y [rows, repeat x.cols]; dx sums the copies.
void repeat_heads_forward(const Matrix& x, std::int64_t width, std::int64_t repeat, const Matrix& y,
                          const LaunchContext& context);
void repeat_heads_backward(const Matrix& dy, std::int64_t width, std::int64_t repeat, const Gradient& dx,
                           const LaunchContext& context);

// x in bf16 as a sum of two: high = round(x), low = round(x - high).
void split_bf16(const Matrix& x, const Matrix& high, const Matrix& low, const LaunchContext& context);

} // namespace gdn::kernels
