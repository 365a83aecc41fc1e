#pragma once
#include <vector>

#include "core/units.h"

// Communication beside compute on the streams that the stack really has: what stays on the clock. Beside each
// other, neither slows the other down [inferred: no published figure separates it].
namespace gdn::cost {

// A GEMM or attention in `parts` pieces, each waiting for its piece of the transfer or handing one on (Transformer
// Engine's user buffers; its ring of keys and values): the first or last piece has nothing beside it.
Seconds in_pieces(Seconds compute, Seconds transfer, std::int64_t parts);

// Pieces of work one after the other, each of which gives one transfer to another stream as it ends (gradients
// reduced behind the backward pass): how long the last transfer ends after the last piece.
Seconds left_behind(const std::vector<Seconds>& compute, const std::vector<Seconds>& transfers);

// Transfers one after the other from the start, each of which one piece of work waits for (parameters gathered
// ahead of the forward pass): by how much the last piece ends later than without them.
Seconds waited_for(const std::vector<Seconds>& compute, const std::vector<Seconds>& transfers);

// One layer's passes as Megatron-LM cuts them for the overlap of expert communication (combined_1f1b): what runs
// before the dispatch, between dispatch and combine, and behind; a layer without experts is all `mixer`.
struct ExpertPasses {
  Seconds mixer = 0, dispatch = 0, experts = 0, combine = 0, behind = 0; // forward
  // Backward, replays included, in its own order: behind, combine, experts (weight gradients apart), dispatch, mixer.
  Seconds behind_backward = 0, combine_backward = 0, experts_backward = 0, experts_wgrad = 0, dispatch_backward = 0, mixer_backward = 0;

  Seconds forward() const { return mixer + dispatch + experts + combine + behind; }
  Seconds backward() const {
    return behind_backward + combine_backward + experts_backward + experts_wgrad + dispatch_backward + mixer_backward;
  }
};

// The forward of one micro-batch's layer beside the backward of another's: one compute stream and one for the
// exchanges, each exchange beside the other micro-batch's work. `delayed_wgrad`: weight gradients of the experts run
// while the backward's dispatch does (delay_wgrad_compute).
Seconds side_by_side(const ExpertPasses& forward, const ExpertPasses& backward, bool delayed_wgrad);

} // namespace gdn::cost
