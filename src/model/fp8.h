#pragma once
#include <string>
#include <vector>

#include "config/run.h"
#include "model/op.h"
#include "model/parameters.h"

// What low-precision recipes change in stack megatron: Transformer Engine's linears keep a quantised copy of
// their input in place of the input, and of their weights for all micro-batches of a step [inferred].
namespace gdn::model {

bool low_precision(const config::Run& run); // an fp8 recipe or fp4

// Bytes of a quantised matrix: one a value (fp4: half), and scales: one fp32 a tensor (delayed, tensorwise),
// one fp32 a block of 128 (blockwise), one byte a block of 32 (mxfp8) or of 16 (fp4).
Bytes quantised_bytes(const config::Run& run, std::int64_t elements);

// Rewrites the parallel linears of `list` and its experts: their products are in low precision, and wgrad reads the
// quantised input. Router, output
// layer and everything that is no linear stay as they are; so does the experts' FC2 where the run recomputes
// moe_act, which keeps the original.
void quantise_inputs(OpList& list, const config::Run& run);

// Quantised weights of a rank: both orientations, one where the GEMMs take any layout (tensorwise scaling on
// sm_100 and later).
Bytes quantised_weights(const ParameterTable& table, const config::Model& model, const config::Run& run,
                        std::int64_t pipeline_rank, int sm);

// A local size of a linear, after parallelism, that the recipe's kernels do not take.
struct Misaligned {
  std::string op, what;           // "in_proj", "columns of the weight"
  std::int64_t size = 0, multiple = 0;
};
std::vector<Misaligned> misaligned(const OpList& list, const config::Run& run);

} // namespace gdn::model
