#include "reference/linear.h"

#include "reference/product.h"

namespace gdn::reference {

template <class T, class O> void linear_forward(In<T> x, In<T> w, ConstValues bias, Out<O> y) {
  expect_shape(w, y.cols, x.cols, "weight of a linear");
  expect_shape(y, x.rows, w.rows, "output of a linear");
  expect_shape(bias, 1, w.rows, "bias of a linear");
  const auto b = load_all<Acc<O>>(bias);
  product<O, T, T>(x.rows, w.rows, x.cols, plain(x), transposed(w), bias ? b.data() : nullptr, y,
                   Write::Overwrite);
}

template <class T, class O> void linear_dgrad(In<O> dy, In<T> w, Grad<T> dx) {
  expect_shape(dx, dy.rows, w.cols, "input gradient of a linear");
  expect_shape(dy, dx.to.rows, w.rows, "output gradient of a linear");
  product<T, O, T>(dy.rows, w.cols, w.rows, plain(dy), plain(w), nullptr, dx.to, dx.write);
}

template <class T, class O> void linear_wgrad(In<O> dy, In<T> x, Out<Acc<T>> dw) {
  expect_shape(dw, dy.cols, x.cols, "weight gradient of a linear");
  expect_shape(dy, x.rows, dw.rows, "output gradient of a linear");
  product<Acc<T>, O, T>(dw.rows, dw.cols, x.rows, transposed(dy), plain(x), nullptr, dw,
                        Write::Accumulate);
}

template <class O> void bias_grad(In<O> dy, Values db) {
  expect_shape(db, 1, dy.cols, "bias gradient");
  std::vector<double> sum(at(dy.cols));
  for (int64 i = 0; i < dy.rows; ++i)
    for (int64 j = 0; j < dy.cols; ++j) sum[at(j)] += static_cast<double>(dy(i, j));
  for (int64 j = 0; j < dy.cols; ++j) db.add(j, sum[at(j)]);
}

namespace {
// Calls op(group, first row, rows) for each group.
template <class Op> void for_each_group(Sequences groups, int64 rows, Op op) {
  check_sequences(groups, rows);
  for (int64 e = 0; e < sequence_count(groups); ++e)
    op(e, groups[at(e)], groups[at(e) + 1] - groups[at(e)]);
}
} // namespace

template <class T> void grouped_linear_forward(In<T> x, In<T> w, Sequences groups, Out<T> y) {
  expect_shape(y, x.rows, y.cols, "output of a grouped linear");
  expect_shape(w, sequence_count(groups) * y.cols, x.cols, "weight of a grouped linear");
  for_each_group(groups, x.rows, [&](int64 e, int64 first, int64 n) {
    linear_forward<T>(x.row_range(first, n), w.row_range(e * y.cols, y.cols), {},
                      y.row_range(first, n));
  });
  zero_rows(y, groups.back());
}

template <class T> void grouped_linear_dgrad(In<T> dy, In<T> w, Sequences groups, Grad<T> dx) {
  expect_shape(w, sequence_count(groups) * dy.cols, dx.to.cols, "weight of a grouped linear");
  for_each_group(groups, dy.rows, [&](int64 e, int64 first, int64 n) {
    linear_dgrad<T>(dy.row_range(first, n), w.row_range(e * dy.cols, dy.cols),
                    Grad<T>(dx.to.row_range(first, n), dx.write));
  });
  zero_rows_of(dx, groups.back());
}

template <class T> void grouped_linear_wgrad(In<T> dy, In<T> x, Sequences groups, Out<Acc<T>> dw) {
  expect_shape(dw, sequence_count(groups) * dy.cols, x.cols, "weight gradient of a grouped linear");
  for_each_group(groups, dy.rows, [&](int64 e, int64 first, int64 n) {
    linear_wgrad<T>(dy.row_range(first, n), x.row_range(first, n),
                    dw.row_range(e * dy.cols, dy.cols));
  });
}

#define GDN_LINEAR(T, O)                                                                           \
  template void linear_forward<T, O>(In<T>, In<T>, ConstValues, Out<O>);                           \
  template void linear_dgrad<T, O>(In<O>, In<T>, Grad<T>);                                         \
  template void linear_wgrad<T, O>(In<O>, In<T>, Out<Acc<T>>);
#define GDN_GROUPED(T)                                                                             \
  template void bias_grad<T>(In<T>, Values);                                                       \
  template void grouped_linear_forward<T>(In<T>, In<T>, Sequences, Out<T>);                        \
  template void grouped_linear_dgrad<T>(In<T>, In<T>, Sequences, Grad<T>);                         \
  template void grouped_linear_wgrad<T>(In<T>, In<T>, Sequences, Out<Acc<T>>);
GDN_LINEAR(bf16, bf16)
GDN_LINEAR(bf16, float)
GDN_LINEAR(float, float)
GDN_LINEAR(double, double)
GDN_GROUPED(bf16)
GDN_GROUPED(float)
GDN_GROUPED(double)
#undef GDN_LINEAR
#undef GDN_GROUPED

} // namespace gdn::reference
