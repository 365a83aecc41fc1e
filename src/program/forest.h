#pragma once
#include <string>
#include <vector>

#include "model/op.h"
#include "model/span.h"

namespace gdn::program {

using model::Span;
using model::SpanKind;
using model::ReplayExtent;

// Op index that made each tensor, -1 for inputs. A view counts as made where an op lists it as an
// output, or where its base was when none does.
std::vector<int> producers(const model::OpList& list);

// Tensors made inside [first, last] and read by an op outside, or the list's output: in op order.
std::vector<model::TensorId> span_outputs(const model::OpList& list, const Span& span);
// Tensors made outside and read by an op inside.
std::vector<model::TensorId> span_arguments(const model::OpList& list, const Span& span);

// The forest of spans over a list's ops: a node is one op, or a span with the nodes inside it.
struct Node {
  int op = -1;    // leaf
  int span = -1;  // index into the span list
  int first = 0, last = 0;
  std::vector<Node> children = {};
};

// Throws Error{Config} naming both spans when two overlap without nesting, or when a hook lies
// outside the span that encloses its discard span, or a discard span would drop the list's output or
// a storage that it does not make.
std::vector<Node> build_forest(const model::OpList& list, const std::vector<Span>& spans);

} // namespace gdn::program
