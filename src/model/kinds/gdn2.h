#pragma once
#include <string>

#include "model/builder.h"

// The ops in which GDN2 (channel-wise gates) differs from GDN.
namespace gdn::model {

struct Gdn2GateOutputs {
  TensorId g; // [R, Hv, dk] fp32, log decay
  TensorId b; // [R, Hv, dk], erase gate
  TensorId w; // [R, Hv, dv], write gate
};
// g = -exp(A_log) softplus(f + dt_bias), b and w sigmoids; f and b at Hk heads, repeated to Hv unless
// attr.grouped. Backward reads the raw sections.
Gdn2GateOutputs gdn2_gates(Builder& b, std::string name, TensorId f, TensorId erase, TensorId write, ParamRef a_log,
                           ParamRef dt_bias, const GdnAttr& attr);

// The chunked rule: o [R, Hv, dv]. Keeps q, k, v, b, w, the raw and the cumulative g and two 64-wide
// matrices a chunk row; its states and WY factors are made again in backward. With attr.deterministic
// the plain form's fp32 intermediates are kept instead. With attr.grouped (native) q, k, g and b enter at
// Hk heads, and the cumulative g is summed again from g in backward instead of being kept.
TensorId gdn2_rule(Builder& b, std::string name, TensorId q, TensorId k, TensorId v, const Gdn2GateOutputs& gates,
                   const GdnAttr& attr);

} // namespace gdn::model
