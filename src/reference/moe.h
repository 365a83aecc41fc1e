#pragma once
#include <span>
#include <vector>

#include "reference/view.h"

// Routing of a mixture of experts and its losses. Routing tensors are small and may have any dtype:
// computed in double, rounded once. The router's GEMM is linear_*, the experts are permute.h,
// grouped_linear_* and swiglu_* of mlp.h.
namespace gdn::reference {

enum class Score { Softmax, Sigmoid };

struct Router {
  int64 experts = 0, top_k = 0;
  Score score = Score::Softmax;
  bool renormalise = true; // weights of the chosen experts sum to 1
  bool balanced = false;   // forced: slot s of the batch goes to expert (first_slot + s) % experts
  int64 first_slot = 0;    // balanced only: first slot of this rank
};

// logits [n, experts] -> index [n, top_k] (Int32 or Int64; descending score, ties by lowest index)
// and weight [n, top_k]. scores [n, experts] (softmax or sigmoid of the logits) is optional.
void route_forward(const Router& r, ConstValues logits, Values index, Values weight, Values scores);
// Gradient of the weights' path; index as chosen by the forward pass.
void route_backward(const Router& r, ConstValues logits, ConstValues index, ConstValues dweight,
                    ValuesGrad dlogits);

// The dense form: probs [n, experts] holds the weights of the chosen experts and 0 elsewhere, map
// [n, experts] (Bool) says which were chosen. Either output may be absent.
void dense_from_slots(ConstValues index, ConstValues weight, Values probs, Values map);
void slots_from_dense(ConstValues index, ConstValues probs, Values weight);

// Slots per expert, [experts].
std::vector<int64> expert_counts(int64 experts, ConstValues index);

// Load balance: coef * E / (kappa n^2) * sum_e cnt_e sum_t p_te, with counts constant in the
// backward pass. kappa = top_k in Megatron-LM (perfect balance gives coef), 1 in HF Transformers. n
// is the number of tokens that the counts cover.
struct BalanceLoss {
  double coef = 0;
  double kappa = 1;
  int64 tokens = 0;
};
double balance_loss(const Router& r, const BalanceLoss& loss, ConstValues logits,
                    std::span<const int64> counts);
// Adds `upstream` * d(loss)/d(logits).
void balance_loss_backward(const Router& r, const BalanceLoss& loss, ConstValues logits,
                           std::span<const int64> counts, double upstream, ValuesGrad dlogits);

// z-loss: coef * mean over rows of (log sum exp logits)^2.
double z_loss(double coef, ConstValues logits);
void z_loss_backward(double coef, ConstValues logits, double upstream, ValuesGrad dlogits);

} // namespace gdn::reference
