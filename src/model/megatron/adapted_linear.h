#pragma once
#include <string>

#include "config/run.h"
#include "model/builder.h"
#include "model/kinds/linear.h"

namespace gdn::model::megatron {

// A linear under its LoRA name ("linear_qkv"): as it is, or with a low-rank adapter beside it whose output is
// added to its own (Megatron-Bridge, ParallelLinearAdapter [inferred]). Column-parallel: A [r, in] is split by
// rows and its output gathered, B [out, r] split as the linear; under sequence parallelism the adapter reads,
// and so keeps, the gathered input. Row-parallel: A is split by columns, its output reduced (and scattered),
// B whole.
TensorId adapted_linear(Builder& b, const std::string& target, std::string name, TensorId x, ParamRef weight,
                        std::int64_t out_cols, LinearAttr attr, const std::string& out, const config::Run& run);

} // namespace gdn::model::megatron
