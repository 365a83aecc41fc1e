#pragma once
#include <cstddef>
#include <functional>

#include "trainer/op_call.h"

// Ops in double: the functions of the CPU device on fp64 operands. What every other result is measured
// against.
namespace gdn::trainer::cpu {

// The list with every floating-point tensor and parameter in fp64, and storages that hold them.
model::OpList widened(model::OpList list);

// Where the memory that an operand of `call` has at `at` lies instead; linear within a buffer.
using Placement = std::function<std::byte*(const std::byte* at, DType dtype)>;

// Runs what `call` runs with the CPU functions on operands that lie elsewhere. `list` is the call's list,
// or that list widened. Nothing is added to the step's totals. The operands of the call count as used.
void run_elsewhere(const OpCall& call, const model::OpList& list, const Placement& place);

// The same for an op Rule and its list widened, in the arithmetic of a sound bf16 kernel (reference/rule_rounded.h).
void run_rounded_rule(const OpCall& call, const model::OpList& wide, const Placement& place);

} // namespace gdn::trainer::cpu
