#pragma once
#include <string>
#include <vector>

#include "core/error.h"
#include "reference/view.h"

// Shared by the op files: conversions between storage and arithmetic types, shape checks.
namespace gdn::reference {

template <class T> inline Acc<T> up(T x) { return static_cast<Acc<T>>(x); }

template <class T> inline void store(T& to, Acc<T> value, Write write) {
  to = static_cast<T>(write == Write::Accumulate ? up(to) + value : value);
}

template <class T> inline void load_row(const T* from, int64 n, Acc<T>* to) {
  for (int64 j = 0; j < n; ++j) to[j] = up(from[j]);
}

template <class T> inline void store_row(const Acc<T>* from, int64 n, T* to, Write write) {
  if (write == Write::Overwrite)
    for (int64 j = 0; j < n; ++j) to[j] = static_cast<T>(from[j]);
  else
    for (int64 j = 0; j < n; ++j) to[j] = static_cast<T>(up(to[j]) + from[j]);
}

// Zeros in the rows first .. rows - 1: outputs past the last sequence or group.
template <class T> inline void zero_rows(const Mat<T>& m, int64 first) {
  for (int64 i = first; m && i < m.rows; ++i)
    for (int64 j = 0; j < m.cols; ++j) m(i, j) = T(0);
}
inline void zero_rows(const Values& m, int64 first) {
  for (int64 i = first; m && i < m.rows; ++i)
    for (int64 j = 0; j < m.cols; ++j) m.set(i, j, 0);
}
template <class G> inline void zero_rows_of(const G& grad, int64 first) {
  if (grad && grad.write == Write::Overwrite) zero_rows(grad.to, first);
}

template <class A> inline std::vector<A> load_all(ConstValues v) {
  std::vector<A> out(static_cast<std::size_t>(v.size()));
  for (int64 i = 0; i < v.rows; ++i)
    for (int64 j = 0; j < v.cols; ++j)
      out[static_cast<std::size_t>(i * v.cols + j)] = static_cast<A>(v.get(i, j));
  return out;
}

inline void expect(bool ok, const char* what) {
  if (!ok) throw Error(ErrorCode::Internal, std::string("reference op: ") + what);
}

// A present view must have this shape; an absent one is fine.
template <class V>
inline void expect_shape(const V& view, int64 rows, int64 cols, const char* name) {
  if (!view || (view.rows == rows && view.cols == cols)) return;
  throw Error(ErrorCode::Internal, std::string("reference op: ") + name + " is [" +
                                       std::to_string(view.rows) + ", " +
                                       std::to_string(view.cols) + "], expected [" +
                                       std::to_string(rows) + ", " + std::to_string(cols) + "]");
}
template <class T>
inline void expect_shape(const Grad<T>& g, int64 rows, int64 cols, const char* name) {
  expect_shape(g.to, rows, cols, name);
}
inline void expect_shape(const ValuesGrad& g, int64 rows, int64 cols, const char* name) {
  expect_shape(g.to, rows, cols, name);
}

// Elements of a small vector as an index type.
inline std::size_t at(int64 i) { return static_cast<std::size_t>(i); }

} // namespace gdn::reference
