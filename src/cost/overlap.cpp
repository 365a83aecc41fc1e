#include "cost/overlap.h"

#include <algorithm>

namespace gdn::cost {

Seconds in_pieces(Seconds compute, Seconds transfer, std::int64_t parts) {
  if (parts <= 1) return compute + transfer;
  return std::max(compute, compute / static_cast<double>(parts) + transfer);
}

Seconds left_behind(const std::vector<Seconds>& compute, const std::vector<Seconds>& transfers) {
  Seconds now = 0, moved = 0;
  for (size_t i = 0; i < compute.size(); ++i) {
    now += compute[i];
    if (transfers[i] > 0) moved = std::max(moved, now) + transfers[i];
  }
  return std::max(0.0, moved - now);
}

Seconds waited_for(const std::vector<Seconds>& compute, const std::vector<Seconds>& transfers) {
  Seconds now = 0, moved = 0, alone = 0;
  for (size_t i = 0; i < compute.size(); ++i) {
    moved += transfers[i];
    now = std::max(now, moved) + compute[i];
    alone += compute[i];
  }
  return now - alone;
}

// combined_1f1b of Megatron-LM (main d98e8a64), one layer:
//   exchange: combine backward | dispatch forward, dispatch backward      | combine forward
//   compute:  mixer forward    | experts backward (wgrad), experts forward | mixer backward
Seconds side_by_side(const ExpertPasses& f, const ExpertPasses& b, bool delayed_wgrad) {
  Seconds compute = b.behind_backward;
  const Seconds combined = compute + b.combine_backward;
  compute += f.mixer;
  const Seconds dispatched = std::max(combined, compute) + f.dispatch;
  compute = std::max(compute, combined) + b.experts_backward + (delayed_wgrad ? 0 : b.experts_wgrad);
  const Seconds returned = std::max(dispatched, compute) + b.dispatch_backward;
  if (delayed_wgrad) compute += b.experts_wgrad;
  compute = std::max(compute, dispatched) + f.experts;
  const Seconds home = std::max(returned, compute) + f.combine;
  compute = std::max(compute, returned) + b.mixer_backward;
  return std::max(compute, home) + f.behind;
}

} // namespace gdn::cost
