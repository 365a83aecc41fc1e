#pragma once
#include "trainer/op_call.h"

// Cross entropy over a vocabulary whose columns are divided over TP ranks: each finds the maximum, the sum of
// exponentials and the label's logit of its columns, the group combines them.
namespace gdn::trainer::cpu {

// Of an op with collectives; of the others nothing.
Bytes divided_loss_scratch(const model::OpList& list, const model::Op& op, int step);

void divided_cross_entropy_forward(const OpCall& call);
void divided_cross_entropy_backward(const OpCall& call);
// The head's GEMM and the loss together, over chunks of tokens.
void divided_linear_cross_entropy_forward(const OpCall& call);
void divided_linear_cross_entropy_backward(const OpCall& call);

} // namespace gdn::trainer::cpu
