#pragma once
#include <string>
#include <vector>

#include "model/builder.h"

// Ops that move tensors: views, copies, concatenation, residual adds, exchanges between ranks.
namespace gdn::model {

// Columns of `base` under new names, as views. Backward: one step `cat` assembles d:base.
struct ColumnSection {
  std::string name;
  std::vector<std::int64_t> shape; // [rows, ...]; columns follow one another in section order
};
std::vector<TensorId> split(Builder& b, std::string name, TensorId base, const std::vector<ColumnSection>& sections);

// The same for a matrix laid out group by group, each group [section | section | ...] over `width`
// columns: a section is [rows * groups, cols], one row a group. Columns that no section covers get a
// zero gradient.
struct GroupSection {
  std::string name;
  std::int64_t first = 0, cols = 0; // inside a group
};
std::vector<TensorId> split_groups(Builder& b, std::string name, TensorId base, std::int64_t groups,
                                   const std::vector<GroupSection>& sections);

// The same sections without an op (native): gradients are slices of d:base, so the sections must cover
// every column.
std::vector<TensorId> group_slices(Builder& b, TensorId base, std::int64_t groups, const std::vector<GroupSection>& sections);

// Runs of rows of `base` under new names, as views. Backward as split.
std::vector<TensorId> split_rows(Builder& b, std::string name, TensorId base, const std::vector<std::string>& parts);

// Contiguous copy of a strided view, in a new storage, under `shape` where one is given. d:x is
// written from d:y.
TensorId copy(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape = {});

// out = inputs side by side (columns) or one below the other (rows). Backward takes d:out apart.
enum class Along { Columns, Rows };
TensorId concat(Builder& b, std::string name, const std::vector<TensorId>& inputs, Along along, std::string out);

// out = x + y. d:x and d:y are d:out itself; later contributions to d:x accumulate into it. With
// `dropout`, y is dropped first: a mask of one byte an element is kept, and d:y is a tensor of its own.
TensorId residual_add(Builder& b, std::string name, TensorId x, TensorId y, std::string out, bool dropout = false);

// Context parallelism: [s/cp, all local heads] <-> [s, heads/cp]; rows and columns trade places,
// bytes stay. Forward and backward each move the whole tensor once. `attr`: the heads behind columns that
// are several sections side by side (head_sections in gdn.h); not given: heads one after the other.
TensorId all_to_all(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape,
                    std::int64_t ranks, Attributes attr = {});

// Columns of all TP ranks, gathered. Backward sums and scatters d:y where every rank contributed to
// it (`reduce`), else takes its own columns. `attr`: a SharedGroupAttr where the columns have another order.
TensorId gather_columns(Builder& b, std::string name, TensorId x, std::int64_t ranks, bool reduce, std::string out, Attributes attr = {});

// Sum of a statistic over ranks, in a new storage; several groups one after the other. No backward.
TensorId all_reduce(Builder& b, std::string name, TensorId x, std::vector<Collective> sums, std::string out);

// This TP rank's rows of a tensor that all ranks hold. Backward gathers d:x.
TensorId scatter_rows(Builder& b, std::string name, TensorId x, std::int64_t ranks, std::string out);

// Token ids or labels, [tokens] int64: the batch's own, or a shifted copy.
TensorId data(Builder& b, std::string name, std::int64_t tokens, std::string out);

} // namespace gdn::model
