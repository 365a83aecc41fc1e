#pragma once
#include "reference/rule.h"

// The chunked rule in the arithmetic of a sound bf16 kernel: every operand of a matrix product, and every
// tensor that is stored, is rounded to bf16 once; sums, gates and running states are exact. How far its
// results are from those of rule_chunk_* in double is what the inputs themselves allow a bf16 kernel: it
// grows where a result is a small difference of large products.
namespace gdn::reference {

// Operands in double, of values that bf16 holds; results are rounded as they would be stored.
void rule_rounded_forward(const RuleShape& shape, Sequences sequences, const RuleForward<double>& p);
void rule_rounded_backward(const RuleShape& shape, Sequences sequences, const RuleBackward<double>& p);

} // namespace gdn::reference
