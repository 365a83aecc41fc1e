#pragma once
#include "kernels/common/matrix.h"

// Cross entropy of rows of logits [N, V], bf16 or fp32; labels [N, 1] Int64, -100: ignored, its loss and gradient
// are 0. Log-sum-exp in fp32.
namespace gdn::kernels {

// Every output may be absent: loss, lse [N, 1]; softmax [N, V]; gradient = softmax - onehot, which may be the
// logits themselves; mask [N] (Bool: ignored) and label_ids [N] (0 where ignored).
struct CrossEntropyForwardParams {
  Matrix logits = {}, labels = {};
  Matrix loss = {}, lse = {}, softmax = {}, gradient = {}, mask = {}, label_ids = {};
};
void cross_entropy_forward(const CrossEntropyForwardParams& params, const LaunchContext& context);

// d_logits (+)= d_loss (softmax - onehot), from logits and lse, or from the kept softmax. d_logits may be the
// logits themselves. mask: rows that are ignored whatever their label says.
struct CrossEntropyBackwardParams {
  Matrix logits = {}, lse = {}, softmax = {}; // the first two, or the third
  Matrix labels = {}, mask = {}, d_loss = {};
  Gradient d_logits = {};
};
void cross_entropy_backward(const CrossEntropyBackwardParams& params, const LaunchContext& context);

} // namespace gdn::kernels
