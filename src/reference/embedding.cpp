#include "reference/embedding.h"

#include "reference/detail.h"

namespace gdn::reference {

template <class T>
void embedding_forward(std::span<const int64> ids, In<T> table, Out<T> y, int64 first,
                       int64 vocab) {
  expect_shape(y, static_cast<int64>(ids.size()), table.cols, "embedded tokens");
  const int64 limit = vocab ? vocab : first + table.rows;
  for (int64 t = 0; t < y.rows; ++t) {
    const int64 id = ids[at(t)], row = id - first;
    if (id < 0 || id >= limit)
      throw Error(ErrorCode::Config,
                  "token " + std::to_string(t) + " has id " + std::to_string(id) +
                      ", outside the vocabulary of " + std::to_string(limit),
                  "the data was made for another vocabulary");
    const bool here = row >= 0 && row < table.rows;
    for (int64 j = 0; j < y.cols; ++j) y(t, j) = here ? table(row, j) : T(0);
  }
}

template <class T>
void embedding_backward(std::span<const int64> ids, In<T> dy, Out<Acc<T>> dtable, int64 first) {
  expect_shape(dy, static_cast<int64>(ids.size()), dtable.cols, "embedding gradient");
  for (int64 t = 0; t < dy.rows; ++t) {
    const int64 row = ids[at(t)] - first;
    if (row < 0 || row >= dtable.rows) continue;
    for (int64 j = 0; j < dy.cols; ++j) dtable(row, j) += up(dy(t, j));
  }
}

#define GDN_EMBEDDING(T)                                                                           \
  template void embedding_forward<T>(std::span<const int64>, In<T>, Out<T>, int64, int64);         \
  template void embedding_backward<T>(std::span<const int64>, In<T>, Out<Acc<T>>, int64);
GDN_EMBEDDING(bf16)
GDN_EMBEDDING(float)
GDN_EMBEDDING(double)
#undef GDN_EMBEDDING

} // namespace gdn::reference
