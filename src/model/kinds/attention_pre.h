#pragma once
#include <optional>
#include <string>

#include "model/builder.h"

namespace gdn::model {

struct AttentionInputs {
  TensorId q; // [R, n, d]
  TensorId k; // [R, g, d]
  TensorId v; // [R, g, d]
};

// Everything between the projection and the core in one op: q and k norm (attr.qk_norm), rotation,
// contiguous heads. q, k, v are sections of the projection, one row a query group, [R g, cols].
// Definition: head_norm, rope, copy. Backward reads q and k where they are normalised, else nothing.
// `q_norm`, `k_norm`: the gains, absent with QkNorm::None.
AttentionInputs attention_pre(Builder& b, std::string name, const AttentionInputs& sections, std::optional<ParamRef> q_norm,
                              std::optional<ParamRef> k_norm, const AttentionAttr& attr);

} // namespace gdn::model
