#pragma once
#include <algorithm>

#include "kernels/common/matrix.h"

// Sums whose order is fixed by the shape alone.
namespace gdn::kernels {

// out[c] += sum over p of parts[p * width + c].
void sum_parts(const float* parts, std::int64_t count, std::int64_t width, float* out, const LaunchContext& context);

// out[c] += sum over rows of weight[r] x[r, c]; weight [rows, 1], absent: 1.
void column_sums(const Matrix& x, const Matrix& weight, float* out, const LaunchContext& context);
constexpr std::int64_t column_sum_parts(std::int64_t rows) { return std::clamp<std::int64_t>(rows / 64, 1, 256); }
constexpr std::int64_t column_sums_scratch(std::int64_t rows, std::int64_t cols) { return column_sum_parts(rows) * cols * 4; }

// *out += factor * sum of x [n, 1], in double.
void add_sum(const Matrix& x, double factor, double* out, const LaunchContext& context);

// *out = sum of x_i^2, in double. Scratch: kSquareParts doubles.
inline constexpr int kSquareParts = 1024;
void sum_of_squares(const float* x, std::int64_t n, double* out, const LaunchContext& context);

} // namespace gdn::kernels
