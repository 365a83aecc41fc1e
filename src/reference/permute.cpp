#include "reference/permute.h"

#include "reference/detail.h"
#include "reference/moe.h"

namespace gdn::reference {

Permutation sort_slots(int64 experts, ConstValues index, int64 capacity) {
  const auto counts = expert_counts(experts, index);
  Permutation p;
  p.groups.assign(at(experts) + 1, 0);
  for (int64 e = 0; e < experts; ++e)
    p.groups[at(e) + 1] = p.groups[at(e)] + (capacity ? capacity : counts[at(e)]);
  p.row_of_slot.assign(at(index.size()), -1);
  p.slot_of_row.assign(at(p.groups.back()), -1);
  std::vector<int64> next(p.groups.begin(), p.groups.end() - 1);
  for (int64 t = 0; t < index.rows; ++t)
    for (int64 j = 0; j < index.cols; ++j) {
      const auto e = static_cast<int64>(index.get(t, j));
      if (next[at(e)] == p.groups[at(e) + 1]) continue; // expert full: the slot is dropped
      const int64 slot = t * index.cols + j, row = next[at(e)]++;
      p.row_of_slot[at(slot)] = row;
      p.slot_of_row[at(row)] = slot;
    }
  return p;
}

void store_row_map(const Permutation& p, Values row_of_slot) {
  for (int64 i = 0; i < row_of_slot.rows; ++i)
    for (int64 j = 0; j < row_of_slot.cols; ++j)
      row_of_slot.set(i, j, static_cast<double>(p.row_of_slot[at(i * row_of_slot.cols + j)]));
}

Permutation load_row_map(ConstValues row_of_slot, int64 rows) {
  Permutation p;
  p.slot_of_row.assign(at(rows), -1);
  for (int64 i = 0; i < row_of_slot.rows; ++i)
    for (int64 j = 0; j < row_of_slot.cols; ++j) {
      const auto row = static_cast<int64>(row_of_slot.get(i, j));
      if (row >= 0) p.slot_of_row[at(row)] = static_cast<int64>(p.row_of_slot.size());
      p.row_of_slot.push_back(row);
    }
  return p;
}

template <class T> void gather_rows(In<T> x, std::span<const int64> source, Grad<T> out) {
  expect_shape(out, static_cast<int64>(source.size()), x.cols, "gathered rows");
  for (int64 i = 0; i < out.to.rows; ++i) {
    const int64 from = source[at(i)];
    for (int64 j = 0; j < x.cols; ++j)
      store(out.to(i, j), from < 0 ? Acc<T>(0) : up(x(from, j)), out.write);
  }
}

namespace {
int64 rows_of(const Permutation& p) { return static_cast<int64>(p.slot_of_row.size()); }
int64 slots_of(const Permutation& p) { return static_cast<int64>(p.row_of_slot.size()); }
} // namespace

template <class T> void permute_forward(const Permutation& p, int64 top_k, In<T> x, Out<T> rows) {
  expect_shape(rows, rows_of(p), x.cols, "permuted rows");
  for (int64 i = 0; i < rows.rows; ++i) {
    const int64 slot = p.slot_of_row[at(i)];
    for (int64 j = 0; j < x.cols; ++j) rows(i, j) = slot < 0 ? T(0) : x(slot / top_k, j);
  }
}

template <class T>
void permute_backward(const Permutation& p, int64 top_k, In<T> drows, Grad<T> dx) {
  expect_shape(drows, rows_of(p), dx.to.cols, "gradient of permuted rows");
  expect_shape(dx, slots_of(p) / top_k, drows.cols, "permutation input gradient");
  std::vector<Acc<T>> sum(at(drows.cols));
  for (int64 t = 0; t < dx.to.rows; ++t) {
    sum.assign(sum.size(), 0);
    for (int64 j = 0; j < top_k; ++j) {
      const int64 row = p.row_of_slot[at(t * top_k + j)];
      for (int64 c = 0; row >= 0 && c < drows.cols; ++c) sum[at(c)] += up(drows(row, c));
    }
    store_row(sum.data(), drows.cols, dx.to.row(t), dx.write);
  }
}

void permute_weights(const Permutation& p, ConstValues weight, Values row_weight) {
  expect_shape(row_weight, rows_of(p), 1, "row weights");
  for (int64 i = 0; i < row_weight.rows; ++i) {
    const int64 slot = p.slot_of_row[at(i)];
    row_weight.set(i, 0, slot < 0 ? 0 : weight.get(slot / weight.cols, slot % weight.cols));
  }
}

void unpermute_weights(const Permutation& p, ConstValues row_weight, ValuesGrad weight) {
  for (int64 t = 0; t < weight.to.rows; ++t)
    for (int64 j = 0; j < weight.to.cols; ++j) {
      const int64 row = p.row_of_slot[at(t * weight.to.cols + j)];
      weight.put(t, j, row < 0 ? 0 : row_weight.get(row, 0));
    }
}

template <class T>
void combine_forward(const Permutation& p, int64 top_k, In<T> rows, ConstValues weight, Out<T> y) {
  using A = Acc<T>;
  expect_shape(rows, rows_of(p), y.cols, "expert rows");
  expect_shape(y, slots_of(p) / top_k, rows.cols, "combined tokens");
  expect_shape(weight, y.rows, top_k, "routing weights");
  std::vector<A> sum(at(y.cols));
  for (int64 t = 0; t < y.rows; ++t) {
    sum.assign(sum.size(), 0);
    for (int64 j = 0; j < top_k; ++j) {
      const int64 row = p.row_of_slot[at(t * top_k + j)];
      const A w = weight ? static_cast<A>(weight.get(t, j)) : A(1);
      for (int64 c = 0; row >= 0 && c < y.cols; ++c) sum[at(c)] += w * up(rows(row, c));
    }
    store_row(sum.data(), y.cols, y.row(t), Write::Overwrite);
  }
}

template <class T>
void combine_backward(const Permutation& p, int64 top_k, In<T> rows, ConstValues weight, In<T> dy,
                      Grad<T> drows, ValuesGrad dweight) {
  using A = Acc<T>;
  expect_shape(drows, rows_of(p), dy.cols, "expert row gradient");
  expect_shape(dy, slots_of(p) / top_k, dy.cols, "combined token gradient");
  expect_shape(dweight, dy.rows, top_k, "routing weight gradient");
  std::vector<A> d(at(dy.cols));
  for (int64 i = 0; drows && i < drows.to.rows; ++i) {
    const int64 slot = p.slot_of_row[at(i)];
    const A w = slot < 0 ? A(0)
                : weight ? static_cast<A>(weight.get(slot / top_k, slot % top_k))
                         : A(1);
    for (int64 c = 0; c < dy.cols; ++c) d[at(c)] = slot < 0 ? A(0) : w * up(dy(slot / top_k, c));
    store_row(d.data(), dy.cols, drows.to.row(i), drows.write);
  }
  for (int64 t = 0; dweight && t < dy.rows; ++t)
    for (int64 j = 0; j < top_k; ++j) {
      const int64 row = p.row_of_slot[at(t * top_k + j)];
      A dot = 0;
      for (int64 c = 0; row >= 0 && c < dy.cols; ++c) dot += up(dy(t, c)) * up(rows(row, c));
      dweight.put(t, j, static_cast<double>(dot));
    }
}

#define GDN_PERMUTE(T)                                                                             \
  template void gather_rows<T>(In<T>, std::span<const int64>, Grad<T>);                            \
  template void permute_forward<T>(const Permutation&, int64, In<T>, Out<T>);                      \
  template void permute_backward<T>(const Permutation&, int64, In<T>, Grad<T>);                    \
  template void combine_forward<T>(const Permutation&, int64, In<T>, ConstValues, Out<T>);         \
  template void combine_backward<T>(const Permutation&, int64, In<T>, ConstValues, In<T>, Grad<T>, \
                                    ValuesGrad);
GDN_PERMUTE(bf16)
GDN_PERMUTE(float)
GDN_PERMUTE(double)
#undef GDN_PERMUTE

} // namespace gdn::reference
