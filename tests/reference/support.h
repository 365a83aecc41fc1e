#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "reference/random.h"
#include "reference/sequences.h"
#include "reference/view.h"

// What the tests of the reference ops share: owning tensors, error measures, central differences.
namespace gdn::reference::test {

inline std::uint64_t& next_stream() {
  static std::uint64_t n = 0;
  return n;
}

// Owns a matrix; outputs start as NaN, so that an element nobody writes is seen.
template <class T> struct Tensor {
  int64 rows, cols;
  std::vector<T> data;

  Tensor(int64 r, int64 c)
      : rows(r), cols(c), data(static_cast<std::size_t>(r * c),
                               static_cast<T>(std::numeric_limits<float>::quiet_NaN())) {}
  Mat<T> view() { return Mat<T>(data.data(), rows, cols); }
  operator Mat<T>() { return view(); }
  operator Mat<const T>() const { return Mat<const T>(data.data(), rows, cols); }
  operator Grad<T>() { return Grad<T>(view()); }
  operator Values() { return view(); }
  operator ConstValues() const { return Mat<const T>(data.data(), rows, cols); }
  operator ValuesGrad() { return ValuesGrad(Values(view())); }
  Grad<T> add() { return Grad<T>(view(), Write::Accumulate); }
  T& operator()(int64 i, int64 j) { return data[static_cast<std::size_t>(i * cols + j)]; }
  T operator()(int64 i, int64 j) const { return data[static_cast<std::size_t>(i * cols + j)]; }

  Tensor& fill(double value) {
    for (T& x : data) x = static_cast<T>(value);
    return *this;
  }
  Tensor& zero() { return fill(0); }
  template <class F> Tensor& each(F f) {
    for (T& x : data) x = static_cast<T>(f());
    return *this;
  }
  Tensor& normal(double stddev = 1) {
    RandomStream stream{.seed = 7, .op = next_stream()++};
    for (std::size_t i = 0; i < data.size(); ++i)
      data[i] = static_cast<T>(stddev * stream.normal(i));
    return *this;
  }
  Tensor& uniform(double lo, double hi) {
    RandomStream stream{.seed = 8, .op = next_stream()++};
    for (std::size_t i = 0; i < data.size(); ++i)
      data[i] = static_cast<T>(lo + (hi - lo) * stream.uniform(i));
    return *this;
  }
  template <class U> Tensor<U> to() const {
    Tensor<U> out(rows, cols);
    for (std::size_t i = 0; i < data.size(); ++i)
      out.data[i] = static_cast<U>(static_cast<double>(data[i]));
    return out;
  }
};

template <class T> Tensor<T> random_tensor(int64 rows, int64 cols, double stddev = 1) {
  return std::move(Tensor<T>(rows, cols).normal(stddev));
}

template <class T> bool same_bits(const Tensor<T>& a, const Tensor<T>& b) {
  return a.data.size() == b.data.size() &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(T)) == 0;
}

// Largest difference relative to the largest entry of the second tensor.
template <class T, class U> double max_error(const Tensor<T>& a, const Tensor<U>& b) {
  REQUIRE(a.data.size() == b.data.size());
  double diff = 0, top = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    const double x = static_cast<double>(a.data[i]), y = static_cast<double>(b.data[i]);
    if (!std::isfinite(x) || !std::isfinite(y)) return std::numeric_limits<double>::infinity();
    diff = std::max(diff, std::abs(x - y));
    top = std::max(top, std::abs(y));
  }
  return diff == 0 ? 0 : diff / std::max(top, 1e-300);
}

template <class T, class U> double l2_error(const Tensor<T>& a, const Tensor<U>& b) {
  REQUIRE(a.data.size() == b.data.size());
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    const double x = static_cast<double>(a.data[i]), y = static_cast<double>(b.data[i]);
    if (!std::isfinite(x)) return std::numeric_limits<double>::infinity();
    diff += (x - y) * (x - y);
    norm += y * y;
  }
  return diff == 0 ? 0 : std::sqrt(diff / std::max(norm, 1e-300));
}

// Random linear functional, the loss of the gradient tests: sum of weight * output.
inline double dot(const Tensor<double>& a, const Tensor<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) sum += a.data[i] * b.data[i];
  return sum;
}

// Fourth-order central differences of `loss` in at most `samples` elements of x against `gradient`;
// the largest difference relative to the largest of the numeric ones.
inline double gradient_error(Tensor<double>& x, const Tensor<double>& gradient,
                             const std::function<double()>& loss, std::size_t samples = 200,
                             double step = 1e-3) {
  REQUIRE(x.data.size() == gradient.data.size());
  const std::size_t stride = std::max<std::size_t>(1, x.data.size() / samples);
  double diff = 0, top = 0;
  for (std::size_t i = 0; i < x.data.size(); i += stride) {
    const double kept = x.data[i];
    auto f = [&](double at) {
      x.data[i] = kept + at;
      return loss();
    };
    const double numeric = (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step);
    x.data[i] = kept;
    if (!std::isfinite(gradient.data[i])) return std::numeric_limits<double>::infinity();
    diff = std::max(diff, std::abs(numeric - gradient.data[i]));
    top = std::max(top, std::abs(numeric));
  }
  return diff == 0 ? 0 : diff / std::max(top, 1e-12);
}

inline constexpr double kNumericGradient = 1e-8; // accepted from central differences in double

inline std::vector<int64> offsets(const std::vector<int64>& lengths) {
  std::vector<int64> cu{0};
  for (const int64 n : lengths) cu.push_back(cu.back() + n);
  return cu;
}

} // namespace gdn::reference::test
