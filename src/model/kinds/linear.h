#pragma once
#include <string>

#include "model/builder.h"

namespace gdn::model {

struct NormOutputs {
  TensorId y;    // as x
  TensorId rstd; // [rows] fp32
};
// y = x * rsqrt(mean(x^2) + eps) * (w or 1 + w). Backward reads x and rstd.
NormOutputs rms_norm(Builder& b, std::string name, TensorId x, ParamRef weight, NormAttr attr, std::string out);

// y = x W^T (+ bias). dgrad reads the weight only, wgrad reads x. Column parallel with sequence
// parallelism gathers x over TP in forward and again in wgrad, and reduce-scatters d:x; row
// parallel reduce-scatters y and gathers d:y (all-reduce without sequence parallelism).
// `weight.elements` and `out_cols` are this rank's; y has x's dtype unless one is given (router
// logits). model_flops = 2 * rows of the GEMM * in * out.
TensorId linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols, LinearAttr attr,
                std::string out);
TensorId linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols, LinearAttr attr,
                std::string out, DType out_dtype);

} // namespace gdn::model
