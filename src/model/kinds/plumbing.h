#pragma once
#include <string>
#include <vector>

#include "model/builder.h"

namespace gdn::model {

// Columns of `base` under new names, as views. Backward: one step `cat` assembles d:base.
struct Section {
  std::string name;
  std::vector<std::int64_t> shape; // [rows, ...]; columns follow one another in section order
};
std::vector<TensorId> split(Builder& b, std::string name, TensorId base, const std::vector<Section>& sections);

// Contiguous copy of a strided view, in a new storage. d:x is written from d:y.
TensorId copy(Builder& b, std::string name, TensorId x, std::string out);

// out = x + y. d:x and d:y are d:out itself; later contributions to d:x accumulate into it.
TensorId residual_add(Builder& b, std::string name, TensorId x, TensorId y, std::string out);

// Context parallelism: [s/cp, all local heads] <-> [s, heads/cp]; rows and columns trade places,
// bytes stay. Forward and backward each move the whole tensor once.
TensorId all_to_all(Builder& b, std::string name, TensorId x, std::string out, std::vector<std::int64_t> shape,
                    std::int64_t ranks);

} // namespace gdn::model
