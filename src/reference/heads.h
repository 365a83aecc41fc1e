#pragma once
#include "reference/view.h"

// Column sections: copies, repeated heads, interleaved layouts. Gradients follow the same moves.
namespace gdn::reference {

// dst = src (same shape); with Accumulate, dst += src. Splits and concatenations are copies between
// column views.
template <class T> void copy(In<T> src, Grad<T> dst);

// y [rows, repeat * cols]: head i of width `head` becomes heads i * repeat .. i * repeat + repeat
// - 1.
template <class T> void repeat_heads_forward(int64 head, int64 repeat, In<T> x, Out<T> y);
// dx: sum over the copies, in order.
template <class T> void repeat_heads_backward(int64 head, int64 repeat, In<T> dy, Grad<T> dx);

// One section of a matrix laid out group by group, as [q heads | gate heads | k | v] per query
// group: section [rows, groups * width] and mixed [rows, groups * group_width], where group i of
// the section lies at columns i * group_width + offset of the mixed matrix.
struct Interleave {
  int64 groups = 1, group_width = 0, offset = 0, width = 0;
};
template <class T> void take_section(const Interleave& s, In<T> mixed, Out<T> section);
// Writes (or adds) the section's gradient into its place; other columns are untouched.
template <class T> void put_section(const Interleave& s, In<T> section, Grad<T> mixed);

} // namespace gdn::reference
