#pragma once
#include "trainer/cuda/collectives.h"

// The loss of logits whose columns are divided over tensor-parallel ranks.
namespace gdn::trainer::cuda {

// Gives the kernel's parameters the outputs that the loss's form keeps for the backward.
template <class Params> void name_kept(const OpCall& c, Params& p) {
  switch (c.attr<model::LossAttr>().form) {
  case model::LossForm::Softmax:
    p.softmax = matrix(c.out(1));
    p.mask = matrix(c.out(2));
    p.label_ids = matrix(c.out(3));
    break;
  case model::LossForm::Overwrite: p.gradient = matrix(c.out(1)); break;
  case model::LossForm::Logits: p.lse = matrix(c.out(1)); break;
  }
}

void divided_cross_entropy_forward(const OpCall& c, Engine& e);
// From the logits; other forms read nothing that differs from a whole vocabulary's.
void divided_cross_entropy_backward(const OpCall& c, Engine& e);
void divided_linear_cross_entropy_forward(const OpCall& c, Engine& e);
void divided_linear_cross_entropy_backward(const OpCall& c, Engine& e);

} // namespace gdn::trainer::cuda
