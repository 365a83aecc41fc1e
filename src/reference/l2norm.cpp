#include "reference/l2norm.h"

#include "reference/detail.h"
#include "reference/l2row.h"

namespace gdn::reference {

template <class T> void l2norm_forward(int64 group, In<T> x, Out<T> y, Values rstd) {
  using A = Acc<T>;
  expect(group > 0 && x.cols % group == 0, "L2 norm group does not divide the columns");
  expect_shape(y, x.rows, x.cols, "L2 norm output");
  expect_shape(rstd, x.rows, x.cols / group, "L2 norm statistic");
  std::vector<A> row(at(group));
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 h = 0; h < x.cols / group; ++h) {
      const A r = l2_normalise<T>(&x(i, h * group), group, kL2NormEps, row.data());
      if (rstd) rstd.set(i, h, static_cast<double>(r));
      if (y) store_row(row.data(), group, &y(i, h * group), Write::Overwrite);
    }
}

template <class T>
void l2norm_backward(int64 group, In<T> y, ConstValues rstd, In<T> dy, Grad<T> dx) {
  using A = Acc<T>;
  expect(group > 0 && y.cols % group == 0, "L2 norm group does not divide the columns");
  expect_shape(dy, y.rows, y.cols, "L2 norm output gradient");
  expect_shape(dx, y.rows, y.cols, "L2 norm input gradient");
  expect_shape(rstd, y.rows, y.cols / group, "L2 norm statistic");
  std::vector<A> row(at(group)), d(at(group));
  for (int64 i = 0; i < y.rows; ++i)
    for (int64 h = 0; h < y.cols / group; ++h) {
      load_row(&y(i, h * group), group, row.data());
      load_row(&dy(i, h * group), group, d.data());
      l2_input_gradient(row.data(), static_cast<A>(rstd.get(i, h)), group, d.data());
      store_row(d.data(), group, &dx.to(i, h * group), dx.write);
    }
}

#define GDN_L2NORM(T)                                                                              \
  template void l2norm_forward<T>(int64, In<T>, Out<T>, Values);                                   \
  template void l2norm_backward<T>(int64, In<T>, ConstValues, In<T>, Grad<T>);
GDN_L2NORM(bf16)
GDN_L2NORM(float)
GDN_L2NORM(double)
#undef GDN_L2NORM

} // namespace gdn::reference
