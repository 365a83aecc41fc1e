#pragma once
#include <span>

#include "reference/view.h"

// Token embedding. With a table split by rows, this shard holds ids first .. first + table.rows -
// 1; other ids read as zeros and receive no gradient here.
namespace gdn::reference {

// ids [tokens], table [vocab rows, hidden] -> y [tokens, hidden]. An id outside the whole
// vocabulary cannot be seen here when the table is a shard: pass `vocab` (0: table.rows) to check.
// Throws Error{Config} naming token and id.
template <class T>
void embedding_forward(std::span<const int64> ids, In<T> table, Out<T> y, int64 first = 0,
                       int64 vocab = 0);
// dtable row += dy row, in token order.
template <class T>
void embedding_backward(std::span<const int64> ids, In<T> dy, Out<Acc<T>> dtable, int64 first = 0);

} // namespace gdn::reference
