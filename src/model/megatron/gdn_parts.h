#pragma once
#include "model/kinds/gdn.h"
#include "model/megatron/gdn.h"

// What the mixers of GDN and GDN2 share (megatron-core, ssm/gated_delta_net/common).
namespace gdn::model::megatron {

// Heads of this rank, after the context-parallel exchange.
GdnAttr gdn_attributes(const config::Model& model, const config::Run& run, const Dims& d);

// Fused norm (te), projection to `width` columns of this TP rank, exchange sequence -> heads.
TensorId project(Builder& b, TensorId x, std::int64_t width, const config::Model& model, const config::Run& run, const Dims& d);

// Convolution with SiLU: one kernel, or a grouped convolution on a contiguous copy and an activation
// in deterministic mode.
TensorId convolve(Builder& b, TensorId qkv, const GdnAttr& attr, const config::Run& run, const Dims& d);

struct PreparedInputs {
  TensorId q, k, v, z; // contiguous, at Hv heads
};
// L2 norm by the caller where `normalise`, split, expansion to Hv heads, contiguous copies.
PreparedInputs prepare(Builder& b, TensorId conv, TensorId z, bool normalise, const GdnAttr& attr);

// Gated norm, exchange heads -> sequence, output projection.
TensorId project_out(Builder& b, TensorId o, TensorId z, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::megatron
