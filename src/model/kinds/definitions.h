#pragma once
#include <vector>

#include "model/op.h"

// What a fused kind computes, written down as a list of plain ops. The CPU reference interprets it,
// and fused kernels are compared with it. A new fused kind is one builder (kinds/) and one entry here.
namespace gdn::model {

struct Definition {
  OpList list;                   // starts with an op "inputs" that brings the fused op's inputs in
  std::vector<TensorId> inputs;  // in the fused op's order: same dtype, shape and row stride
  std::vector<TensorId> outputs; // in the fused op's order: same dtype and shape
};

bool is_fused(OpKind kind);

// The definition of `op` of `list`. Its ops name the fused op's own parameters. Running its backward
// steps in reverse, from the gradients of `outputs` to those of `inputs`, is the fused op's backward.
// Throws Error{Internal} when the kind is not fused.
Definition definition(const OpList& list, const Op& op);

} // namespace gdn::model
