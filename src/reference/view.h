#pragma once
#include <cstdint>
#include <span>
#include <type_traits>

#include "core/dtype.h"
#include "reference/bf16.h"

// Plain views that every function of this room works on. Nothing here owns memory. Rows are tokens
// (packed: sequence after sequence), heads are column groups: q is [tokens, key_heads * key_dim].
// A view without data means "absent": an optional input, or an output that nobody wants.
namespace gdn::reference {

using int64 = std::int64_t;

// Arithmetic type of a storage type: float for bf16 and float, double for double.
template <class T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <class T> using Acc = typename AccOf<std::remove_const_t<T>>::type;

// Matrix view, last dimension contiguous; `stride` elements from row to row, so a column slice of a
// wider matrix is a view as well.
template <class T> struct Mat {
  T* data = nullptr;
  int64 rows = 0, cols = 0, stride = 0;

  Mat() = default;
  Mat(T* d, int64 r, int64 c) : data(d), rows(r), cols(c), stride(c) {}
  Mat(T* d, int64 r, int64 c, int64 s) : data(d), rows(r), cols(c), stride(s) {}
  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_const_v<U>) Mat(const Mat<U>& m)
      : data(m.data), rows(m.rows), cols(m.cols), stride(m.stride) {}

  explicit operator bool() const { return data != nullptr; }
  T* row(int64 i) const { return data + i * stride; }
  T& operator()(int64 i, int64 j) const { return data[i * stride + j]; }
  Mat columns(int64 first, int64 count) const {
    return Mat(data ? data + first : nullptr, rows, count, stride);
  }
  Mat row_range(int64 first, int64 count) const {
    return data ? Mat(data + first * stride, count, cols, stride) : Mat(nullptr, 0, cols, stride);
  }
};

// Parameter types of inputs and outputs. They take no part in template argument deduction:
// functions are called with the storage type named, f<bf16>(...), and views convert.
template <class T> using In = std::type_identity_t<Mat<const T>>;
template <class T> using Out = std::type_identity_t<Mat<T>>;

// Whether a gradient is the first to be written or is added to what is there (in the arithmetic
// type, rounded once). Parameter gradients have no such flag: they always accumulate.
enum class Write { Overwrite, Accumulate };

template <class T> struct Grad {
  Mat<T> to;
  Write write = Write::Overwrite;
  Grad() = default;
  Grad(Mat<T> m, Write w = Write::Overwrite) : to(m), write(w) {}
  explicit operator bool() const { return to.data != nullptr; }
};

template <class T> constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, bf16>)
    return DType::BF16;
  else if constexpr (std::is_same_v<T, float>)
    return DType::FP32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::FP64;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return DType::Int32;
  else if constexpr (std::is_same_v<T, bool>)
    return DType::Bool;
  else {
    static_assert(std::is_same_v<T, int64>, "no DType for this storage type");
    return DType::Int64;
  }
}

// View of a small tensor whose dtype is known at run time: per-head gates, statistics, parameters
// other than matrices, expert indices. BF16, FP32, FP64, Int32, Int64 and Bool. Elements travel as
// double, which holds all of them exactly, and are rounded once when stored.
struct ConstValues {
  const void* data = nullptr;
  DType type = DType::FP32;
  int64 rows = 0, cols = 0, stride = 0;

  ConstValues() = default;
  ConstValues(const void* d, DType t, int64 r, int64 c, int64 s)
      : data(d), type(t), rows(r), cols(c), stride(s) {}
  template <class T>
  ConstValues(const Mat<T>& m)
      : ConstValues(m.data, dtype_of<std::remove_const_t<T>>(), m.rows, m.cols, m.stride) {}

  explicit operator bool() const { return data != nullptr; }
  int64 size() const { return rows * cols; }
  double get(int64 i, int64 j) const;
  double get(int64 i) const { return get(0, i); } // of a vector [1, n]
};

struct Values {
  void* data = nullptr;
  DType type = DType::FP32;
  int64 rows = 0, cols = 0, stride = 0;

  Values() = default;
  Values(void* d, DType t, int64 r, int64 c, int64 s)
      : data(d), type(t), rows(r), cols(c), stride(s) {}
  template <class T>
  requires(!std::is_const_v<T>) Values(const Mat<T>& m)
      : Values(m.data, dtype_of<T>(), m.rows, m.cols, m.stride) {}

  operator ConstValues() const { return {data, type, rows, cols, stride}; }
  explicit operator bool() const { return data != nullptr; }
  int64 size() const { return rows * cols; }
  double get(int64 i, int64 j) const { return ConstValues(*this).get(i, j); }
  double get(int64 i) const { return get(0, i); }
  void set(int64 i, int64 j, double value) const;
  void set(int64 i, double value) const { set(0, i, value); }
  void add(int64 i, int64 j, double value) const { set(i, j, get(i, j) + value); }
  void add(int64 i, double value) const { add(0, i, value); }
};

struct ValuesGrad {
  Values to;
  Write write = Write::Overwrite;
  ValuesGrad() = default;
  ValuesGrad(Values v, Write w = Write::Overwrite) : to(v), write(w) {}
  template <class T> ValuesGrad(const Mat<T>& m, Write w = Write::Overwrite) : to(m), write(w) {}
  explicit operator bool() const { return to.data != nullptr; }
  void put(int64 i, int64 j, double value) const {
    to.set(i, j, write == Write::Accumulate ? to.get(i, j) + value : value);
  }
};

// A vector seen as [1, n].
template <class T> Mat<T> vector_view(T* data, int64 n) { return Mat<T>(data, 1, n, n); }
template <class T> Mat<T> vector_view(std::span<T> s) {
  return Mat<T>(s.data(), 1, static_cast<int64>(s.size()), static_cast<int64>(s.size()));
}

} // namespace gdn::reference
