#pragma once
#include <string>

#include "model/builder.h"

namespace gdn::model {

struct GdnPreOutputs {
  TensorId q, k; // [R, Hk, dk], L2-normalised
  TensorId v;    // [R, Hv, dv]
  TensorId g;    // [R, Hv] fp32, log decay
  TensorId beta; // [R, Hv] fp32
};

struct GdnPreParams {
  ParamRef conv, a_log, dt_bias;
};

// Everything between the projection and the rule in one op: causal conv + SiLU, split, q/k L2 norm,
// gates. Definition: conv_silu, l2_norm on the q|k columns, gates. Backward reads the projection
// alone (views qkv, beta_logits, alpha) and rebuilds what it needs row by row.
GdnPreOutputs gdn_pre(Builder& b, std::string name, TensorId qkv, TensorId beta_logits, TensorId alpha,
                      GdnPreParams params, const GdnAttr& attr);

// What both front ends share: parameters (a bias of the convolution follows the others), the one
// backward step, which reads every input and writes its gradient, and the convolution's FLOPs.
void gdn_pre_backward(const Builder& b, Op& op, GdnPreParams params, const GdnAttr& attr);

} // namespace gdn::model
