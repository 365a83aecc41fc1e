#pragma once
#include "trainer/cuda/collectives.h"

// The loss of logits whose columns are divided over tensor-parallel ranks.
namespace gdn::trainer::cuda {

void divided_cross_entropy_forward(const OpCall& c, Engine& e);
// From the logits; other forms read nothing that differs from a whole vocabulary's.
void divided_cross_entropy_backward(const OpCall& c, Engine& e);
void divided_linear_cross_entropy_forward(const OpCall& c, Engine& e);
void divided_linear_cross_entropy_backward(const OpCall& c, Engine& e);

} // namespace gdn::trainer::cuda
