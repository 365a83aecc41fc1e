#include "reference/linear.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

TEST_CASE("a linear equals the triple loop, at sizes around the tiles") {
  for (const auto [rows, in, out] :
       {std::array<int64, 3>{1, 1, 1}, {15, 3, 63}, {16, 256, 64}, {17, 257, 65}, {33, 600, 130}}) {
    CAPTURE(rows);
    auto x = random_tensor<double>(rows, in), w = random_tensor<double>(out, in);
    auto b = random_tensor<double>(1, out);
    Tensor<double> y(rows, out), expected(rows, out);
    linear_forward<double>(x, w, b, y);
    for (int64 i = 0; i < rows; ++i)
      for (int64 j = 0; j < out; ++j) {
        double sum = b(0, j);
        for (int64 k = 0; k < in; ++k) sum += x(i, k) * w(j, k);
        expected(i, j) = sum;
      }
    CHECK(max_error(y, expected) < 1e-13);
  }
}

TEST_CASE("gradients of a linear against central differences") {
  auto x = random_tensor<double>(7, 5), w = random_tensor<double>(6, 5),
       b = random_tensor<double>(1, 6);
  const auto dy = random_tensor<double>(7, 6);
  Tensor<double> y(7, 6), dx(7, 5), dw(6, 5), db(1, 6);
  auto loss = [&] {
    linear_forward<double>(x, w, b, y);
    return dot(dy, y);
  };
  linear_dgrad<double>(dy, w, dx);
  linear_wgrad<double>(dy, x, dw.zero());
  bias_grad<double>(dy, db.zero());
  CHECK(gradient_error(x, dx, loss) < kNumericGradient);
  CHECK(gradient_error(w, dw, loss) < kNumericGradient);
  CHECK(gradient_error(b, db, loss) < kNumericGradient);

  SUBCASE("input gradients accumulate on demand, parameter gradients always") {
    auto twice = dx;
    linear_dgrad<double>(dy, w, twice.add());
    linear_wgrad<double>(dy, x, dw);
    for (std::size_t i = 0; i < dx.data.size(); ++i) CHECK(twice.data[i] == 2 * dx.data[i]);
    CHECK(gradient_error(w, dw, [&] { return 2 * loss(); }) < kNumericGradient);
  }
}

TEST_CASE_TEMPLATE("a row's result does not depend on the other rows", T, float, bf16) {
  const auto x = random_tensor<T>(100, 300), w = random_tensor<T>(70, 300);
  Tensor<T> all(100, 70), one(1, 70);
  linear_forward<T>(x, w, {}, all);
  for (int64 i = 0; i < 100; i += 9) {
    linear_forward<T>(Mat<const T>(x).row_range(i, 1), w, {}, one);
    for (int64 j = 0; j < 70; ++j) CHECK(one(0, j) == all(i, j));
  }
  // Nor on where the operands lie: column slices of wider matrices.
  Tensor<T> wide(100, 311);
  for (int64 i = 0; i < 100; ++i)
    for (int64 j = 0; j < 300; ++j) wide(i, j + 7) = x(i, j);
  Tensor<T> sliced(100, 70);
  linear_forward<T>(wide.view().columns(7, 300), w, {}, sliced);
  CHECK(same_bits(sliced, all));
}

TEST_CASE("bf16 operands multiply exactly and round once") {
  const auto x = random_tensor<bf16>(9, 40), w = random_tensor<bf16>(11, 40);
  Tensor<bf16> y(9, 11);
  Tensor<float> wide(9, 11);
  linear_forward<bf16>(x, w, {}, y);
  linear_forward<bf16, float>(x, w, {}, wide);
  const auto xd = x.to<double>(), wd = w.to<double>();
  Tensor<double> exact(9, 11);
  linear_forward<double>(xd, wd, {}, exact);
  CHECK(max_error(wide, exact) < 1e-6);
  for (int64 i = 0; i < 9; ++i)
    for (int64 j = 0; j < 11; ++j) CHECK(y(i, j) == static_cast<bf16>(wide(i, j)));
}

TEST_CASE("a grouped linear is one linear a group, gradients included") {
  const std::vector<int64> groups{0, 3, 3, 20, 21}; // one group is empty, two rows are past the end
  const int64 rows = 23, in = 12, out = 9, experts = 4;
  const auto x = random_tensor<double>(rows, in), w = random_tensor<double>(experts * out, in);
  const auto dy = random_tensor<double>(rows, out);
  Tensor<double> y(rows, out), dx(rows, in), dw(experts * out, in);
  grouped_linear_forward<double>(x, w, groups, y);
  grouped_linear_dgrad<double>(dy, w, groups, dx);
  grouped_linear_wgrad<double>(dy, x, groups, dw.zero());
  Tensor<double> dw_loop(experts * out, in);
  dw_loop.zero();
  for (int64 e = 0; e < experts; ++e)
    for (int64 i = groups[std::size_t(e)]; i < groups[std::size_t(e) + 1]; ++i)
      for (int64 o = 0; o < out; ++o) {
        double sum = 0;
        for (int64 k = 0; k < in; ++k) {
          sum += x(i, k) * w(e * out + o, k);
          dw_loop(e * out + o, k) += dy(i, o) * x(i, k);
        }
        CHECK(y(i, o) == doctest::Approx(sum).epsilon(1e-13));
      }
  CHECK(max_error(dw, dw_loop) < 1e-13);
  for (int64 i = 21; i < rows; ++i) {
    for (int64 o = 0; o < out; ++o) CHECK(y(i, o) == 0);
    for (int64 k = 0; k < in; ++k) CHECK(dx(i, k) == 0);
  }
}
