#pragma once
#include "config/model.h"
#include "config/run.h"
#include "core/units.h"

// Model FLOPs by Megatron-LM's formula (num_floating_point_operations), as the op lists carry them.
// Its quirks, kept so that TFLOP/s compare: the delta rule counts 4 Hv dv^2 (the recurrence, with dv
// in place of dk; the chunked kernel executes more), attention the causal half, routers, shared gates
// and norms nothing (except MTP's three norms, 2h each), recompute nothing, vision towers nothing.
namespace gdn::model {

// Which mixer an MTP layer is counted with. It is built like the last decoder layer; Megatron-LM
// counts it by continuing the layer pattern, so an integer frequency m makes it a GDN layer unless
// (L + i + 1) % m == 0.
enum class MtpMixer { LastLayer, ByFrequency };

struct ModelFlops {
  Flops layers = 0, head = 0, mtp = 0; // forward, per token; mtp includes its own heads
  Flops forward() const { return layers + head + mtp; }
  Flops training() const { return 3 * forward(); } // backward is twice forward
};

// Per token of a sequence of `seq` tokens. Throws Error{Config} naming the kind of a layer that has no
// op list: an unknown model has no count, never zero.
ModelFlops model_flops_per_token(const config::Model& model, std::int64_t seq, bool with_mtp = true,
                                 MtpMixer mixer = MtpMixer::LastLayer);

} // namespace gdn::model
