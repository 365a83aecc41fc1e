#pragma once
#include <string_view>

#include "core/units.h"
#include "model/op.h"

namespace gdn::model {

struct StateBytes;

// Op families by which efficiencies are measured and looked up ("family" of a hardware profile).
enum class Family {
  Gemm, GroupedGemm, Attention, Rule, Conv, Norm, Elementwise, Permute, Router, CrossEntropy,
  Embedding, Optimizer, None
};
std::string_view name_of(Family family); // "gemm", "grouped_gemm", "attention", "rule", ...

// What one run of an op (step -1: forward) or of one backward step needs and costs on one rank.
struct Work {
  Bytes scratch = 0;       // allocated before, freed after the run; nothing else is hidden in an op
  Flops flops = 0;         // executed
  Bytes traffic = 0;       // bytes read and written in device memory
  Family family = Family::None;
  double size = 0;         // what efficiencies are tabulated by: FLOPs or bytes, or rows per expert for GroupedGemm
  int kernels = 1;         // launches
  int bits = 16;           // of the operands of its products: 8, 4; 16: bf16, or what the run has
  Bytes quantising = 0;    // bytes that kernels in front of it move to make its operands; not in `traffic`
  std::string_view op = {}; // of a static text: whose own rows of a profile go before the family's; empty: none
};

// *What is kept* is the op list's; *what a run needs and costs* is a provider's: `upstream` (FLA,
// Transformer Engine, cuBLAS, PyTorch), `own` (our CUDA kernels), `cpu`.
class Provider {
public:
  virtual ~Provider() = default;
  virtual std::string_view name() const = 0;
  virtual Work work(const OpList& list, const Op& op, int step) const = 0;
  // Bytes that gradients and state move once a step: zeroing, norm, Adam. `state`: parameters and gradients whole,
  // optimizer the part updated here; `ranks` hold the same, and `shards` of them share the update. The passes
  // of Megatron-LM.
  virtual Bytes update_traffic(const StateBytes& state, std::int64_t ranks, std::int64_t shards) const;
};

const Provider& upstream_provider();

} // namespace gdn::model
