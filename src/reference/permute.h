#pragma once
#include <span>
#include <vector>

#include "reference/sequences.h"
#include "reference/view.h"

// Moving tokens to the rows of their experts and back. Sums run over a token's slots in order:
// gathers only, never a scatter-add.
namespace gdn::reference {

// Stable counting sort of the slots (t, j) by expert, in slot order.
struct Permutation {
  std::vector<int64> row_of_slot; // [n * top_k]; -1: dropped (capacity exceeded)
  std::vector<int64> slot_of_row; // [rows]; -1: padding
  std::vector<int64> groups;      // [experts + 1], row ranges of the experts
};
// capacity 0: dropless, rows = n * top_k. Otherwise every expert owns `capacity` rows, later slots
// of a full expert are dropped and unused rows are zeros.
Permutation sort_slots(int64 experts, ConstValues index, int64 capacity = 0);

// The row map as a tensor [n, top_k] and back; the group ranges travel on their own.
void store_row_map(const Permutation& p, Values row_of_slot);
Permutation load_row_map(ConstValues row_of_slot, int64 rows);

// Row i of the result is row `source[i]` of x, zeros where source is -1.
template <class T> void gather_rows(In<T> x, std::span<const int64> source, Grad<T> out);

// Xp row pi(t, j) = x_t; dx_t = sum_j dXp_pi(t, j), in order of j.
template <class T> void permute_forward(const Permutation& p, int64 top_k, In<T> x, Out<T> rows);
template <class T>
void permute_backward(const Permutation& p, int64 top_k, In<T> drows, Grad<T> dx);
// Weight of each row, [rows, 1], zero on padding; and its adjoint, [n, top_k].
void permute_weights(const Permutation& p, ConstValues weight, Values row_weight);
void unpermute_weights(const Permutation& p, ConstValues row_weight, ValuesGrad weight);

// y_t = sum_j w_tj Yp_pi(t, j); weight absent: 1 (folded into the activation).
template <class T>
void combine_forward(const Permutation& p, int64 top_k, In<T> rows, ConstValues weight, Out<T> y);
// dYp = w dy, dw = dy . Yp; `rows` is read only for dweight.
template <class T>
void combine_backward(const Permutation& p, int64 top_k, In<T> rows, ConstValues weight, In<T> dy,
                      Grad<T> drows, ValuesGrad dweight);

} // namespace gdn::reference
