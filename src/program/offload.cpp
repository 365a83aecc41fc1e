#include "program/offload.h"

#include <algorithm>
#include <cmath>

namespace gdn::program {

Bytes offload(UnitTrace& t, const OffloadRule& rule) {
  struct Move { BufferId buffer; int out, back; };
  std::vector<Move> moves;
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const Buffer& b = t.buffers[i];
    const BufferId id = static_cast<BufferId>(i);
    const bool crosses = !b.gradient && !b.external && b.drop < 0 && b.alloc < t.forward_end && b.last >= t.forward_end;
    const bool attribute = std::any_of(t.sticky.begin(), t.sticky.end(), [&](const auto& s) { return s.buffer == id; });
    if (!crosses || attribute || id == t.input || id == t.output || b.bytes < rule.smallest) continue;
    Move move{id, -1, -1};
    bool eligible = false;
    for (int e = 0; e < static_cast<int>(t.events.size()); ++e) {
      const Event& event = t.events[static_cast<size_t>(e)];
      for (std::uint32_t k = event.first_access; k < event.first_access + event.access_count; ++k) {
        if (t.accesses[k].buffer != id) continue;
        if (e < t.forward_end) move.out = e;
        else if (move.back < 0) move.back = e;
        if (event.step >= 0) eligible = eligible || rule.op(t.list->ops[static_cast<size_t>(event.op)]);
      }
    }
    if (eligible && move.out >= 0 && move.back >= 0) moves.push_back(move);
  }
  moves.resize(static_cast<size_t>(std::floor(static_cast<double>(moves.size()) * rule.fraction + 1e-9)));
  Bytes bytes = 0;
  for (const Move& m : moves) {
    Buffer& b = t.buffers[static_cast<size_t>(m.buffer)];
    b.drop = m.out;
    b.refill = m.back;
    bytes += b.bytes;
  }
  return bytes;
}

} // namespace gdn::program
