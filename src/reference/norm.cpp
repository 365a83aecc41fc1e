#include "reference/norm.h"

#include <cmath>

#include "reference/activation.h"
#include "reference/detail.h"

namespace gdn::reference {
namespace {

int64 group_of(const RmsNorm& norm, int64 cols) {
  const int64 group = norm.group ? norm.group : cols;
  expect(group > 0 && cols % group == 0, "norm group does not divide the columns");
  return group;
}

// The factor that multiplies the normalised value.
template <class A>
std::vector<A> effective_weight(const RmsNorm& norm, ConstValues weight, int64 n) {
  expect_shape(weight, 1, n, "norm weight");
  auto w = load_all<A>(weight);
  if (norm.zero_centred)
    for (A& x : w) x += 1;
  return w;
}

template <class A> A inverse_rms(const A* x, int64 n, double eps) {
  A sum = 0;
  for (int64 j = 0; j < n; ++j) sum += x[j] * x[j];
  return 1 / std::sqrt(sum / static_cast<A>(n) + static_cast<A>(eps));
}

// e is dy times the weight, x the input; on return e is the input gradient.
template <class A> void input_gradient(const A* x, A rstd, int64 n, A* e) {
  A dot = 0;
  for (int64 j = 0; j < n; ++j) dot += e[j] * x[j];
  const A mean = dot * rstd / static_cast<A>(n);
  for (int64 j = 0; j < n; ++j) e[j] = rstd * (e[j] - x[j] * rstd * mean);
}

void add_all(const std::vector<double>& sum, const Values& to) {
  for (int64 j = 0; to && j < to.cols; ++j) to.add(j, sum[at(j)]);
}

} // namespace

template <class T>
void rms_norm_forward(const RmsNorm& norm, In<T> x, ConstValues weight, Out<T> y, Values rstd) {
  using A = Acc<T>;
  const int64 n = group_of(norm, x.cols), groups = x.cols / n;
  expect_shape(y, x.rows, x.cols, "norm output");
  expect_shape(rstd, x.rows, groups, "norm statistic");
  const auto w = effective_weight<A>(norm, weight, n);
  std::vector<A> row(at(n));
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 h = 0; h < groups; ++h) {
      load_row(&x(i, h * n), n, row.data());
      const A r = inverse_rms(row.data(), n, norm.eps);
      if (rstd) rstd.set(i, h, static_cast<double>(r));
      if (!y) continue;
      for (int64 j = 0; j < n; ++j) row[at(j)] = row[at(j)] * r * w[at(j)];
      store_row(row.data(), n, &y(i, h * n), Write::Overwrite);
    }
}

template <class T>
void rms_norm_backward(const RmsNorm& norm, In<T> x, ConstValues weight, ConstValues rstd, In<T> dy,
                       Grad<T> dx, Values dweight) {
  using A = Acc<T>;
  const int64 n = group_of(norm, x.cols), groups = x.cols / n;
  expect_shape(dy, x.rows, x.cols, "norm output gradient");
  expect_shape(dx, x.rows, x.cols, "norm input gradient");
  expect_shape(rstd, x.rows, groups, "norm statistic");
  expect_shape(dweight, 1, n, "norm weight gradient");
  const auto w = effective_weight<A>(norm, weight, n);
  std::vector<A> row(at(n)), e(at(n));
  std::vector<double> dw(at(n));
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 h = 0; h < groups; ++h) {
      load_row(&x(i, h * n), n, row.data());
      load_row(&dy(i, h * n), n, e.data());
      const A r = rstd ? static_cast<A>(rstd.get(i, h)) : inverse_rms(row.data(), n, norm.eps);
      for (int64 j = 0; j < n; ++j) {
        dw[at(j)] += static_cast<double>(e[at(j)] * row[at(j)] * r);
        e[at(j)] *= w[at(j)];
      }
      if (!dx) continue;
      input_gradient(row.data(), r, n, e.data());
      store_row(e.data(), n, &dx.to(i, h * n), dx.write);
    }
  add_all(dw, dweight);
}

template <class T>
void gated_norm_forward(const RmsNorm& norm, In<T> o, In<T> z, ConstValues weight, Out<T> y,
                        Values rstd, Out<T> o_norm) {
  using A = Acc<T>;
  const int64 n = group_of(norm, o.cols), groups = o.cols / n;
  expect_shape(z, o.rows, o.cols, "gate of the gated norm");
  expect_shape(y, o.rows, o.cols, "gated norm output");
  expect_shape(rstd, o.rows, groups, "norm statistic");
  expect_shape(o_norm, o.rows, o.cols, "normalised value");
  const auto w = effective_weight<A>(norm, weight, n);
  std::vector<A> row(at(n));
  for (int64 i = 0; i < o.rows; ++i)
    for (int64 h = 0; h < groups; ++h) {
      load_row(&o(i, h * n), n, row.data());
      const A r = inverse_rms(row.data(), n, norm.eps);
      if (rstd) rstd.set(i, h, static_cast<double>(r));
      for (int64 j = 0; j < n; ++j) row[at(j)] *= r * w[at(j)];
      if (o_norm) {
        store_row(row.data(), n, &o_norm(i, h * n), Write::Overwrite);
        load_row(&o_norm(i, h * n), n, row.data());
      }
      if (!y) continue;
      for (int64 j = 0; j < n; ++j) row[at(j)] *= silu(up(z(i, h * n + j)));
      store_row(row.data(), n, &y(i, h * n), Write::Overwrite);
    }
}

template <class T>
void gated_norm_backward(const RmsNorm& norm, In<T> o, In<T> z, ConstValues weight,
                         ConstValues rstd, In<T> dy, Grad<T> d_o, Grad<T> dz, Values dweight,
                         In<T> o_norm) {
  using A = Acc<T>;
  const int64 n = group_of(norm, o.cols), groups = o.cols / n;
  expect_shape(z, o.rows, o.cols, "gate of the gated norm");
  expect_shape(dy, o.rows, o.cols, "gated norm output gradient");
  expect_shape(d_o, o.rows, o.cols, "gated norm input gradient");
  expect_shape(dz, o.rows, o.cols, "gate gradient");
  expect_shape(rstd, o.rows, groups, "norm statistic");
  expect_shape(dweight, 1, n, "norm weight gradient");
  expect_shape(o_norm, o.rows, o.cols, "normalised value");
  const auto w = effective_weight<A>(norm, weight, n);
  std::vector<A> row(at(n)), e(at(n)), gate(at(n)), normed(at(n));
  std::vector<double> dw(at(n));
  for (int64 i = 0; i < o.rows; ++i)
    for (int64 h = 0; h < groups; ++h) {
      load_row(&o(i, h * n), n, row.data());
      load_row(&dy(i, h * n), n, e.data());
      load_row(&z(i, h * n), n, gate.data());
      const A r = rstd ? static_cast<A>(rstd.get(i, h)) : inverse_rms(row.data(), n, norm.eps);
      if (o_norm)
        load_row(&o_norm(i, h * n), n, normed.data());
      else
        for (int64 j = 0; j < n; ++j) normed[at(j)] = row[at(j)] * (r * w[at(j)]);
      for (int64 j = 0; j < n; ++j) {
        const A d = e[at(j)], s = gate[at(j)];
        gate[at(j)] = d * normed[at(j)] * silu_slope(s);
        e[at(j)] = d * silu(s);
        dw[at(j)] += static_cast<double>(e[at(j)] * row[at(j)] * r);
        e[at(j)] *= w[at(j)];
      }
      if (dz) store_row(gate.data(), n, &dz.to(i, h * n), dz.write);
      if (!d_o) continue;
      input_gradient(row.data(), r, n, e.data());
      store_row(e.data(), n, &d_o.to(i, h * n), d_o.write);
    }
  add_all(dw, dweight);
}

#define GDN_NORM(T)                                                                                \
  template void rms_norm_forward<T>(const RmsNorm&, In<T>, ConstValues, Out<T>, Values);           \
  template void rms_norm_backward<T>(const RmsNorm&, In<T>, ConstValues, ConstValues, In<T>,       \
                                     Grad<T>, Values);                                             \
  template void gated_norm_forward<T>(const RmsNorm&, In<T>, In<T>, ConstValues, Out<T>, Values,   \
                                      Out<T>);                                                     \
  template void gated_norm_backward<T>(const RmsNorm&, In<T>, In<T>, ConstValues, ConstValues,     \
                                       In<T>, Grad<T>, Grad<T>, Values, In<T>);
GDN_NORM(bf16)
GDN_NORM(float)
GDN_NORM(double)
#undef GDN_NORM

} // namespace gdn::reference
