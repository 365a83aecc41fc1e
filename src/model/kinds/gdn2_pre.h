#pragma once
#include <string>

#include "model/builder.h"
#include "model/kinds/gdn_pre.h"

namespace gdn::model {

struct Gdn2Inputs {
  TensorId q, k; // [R, Hk, dk], L2-normalised
  TensorId v;    // [R, Hv, dv]
  TensorId g;    // [R, Hk, dk] fp32, log decay
  TensorId b;    // [R, Hk, dk], erase gate
  TensorId w;    // [R, Hv, dv], write gate
};

// gdn_pre with channel-wise gates: causal conv + SiLU, split, q/k L2 norm, gates at Hk heads.
// Definition: conv_silu, l2_norm on the q|k columns, gdn2_gates. Backward reads the projection alone
// (views qkv, f, erase, write).
Gdn2Inputs gdn2_pre(Builder& b, std::string name, TensorId qkv, TensorId f, TensorId erase, TensorId write,
                    GdnPreParams params, const GdnAttr& attr);

} // namespace gdn::model
