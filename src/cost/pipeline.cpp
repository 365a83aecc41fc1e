#include "cost/pipeline.h"

#include <algorithm>

#include "core/error.h"

namespace gdn::cost {

using program::Pass;
using program::Slot;

PipelineTime simulate_pipeline(const std::vector<std::vector<Slot>>& slots,
                               const std::vector<std::vector<Seconds>>& forward,
                               const std::vector<std::vector<Seconds>>& backward, const PipelineOptions& options) {
  const size_t ranks = slots.size();
  const size_t chunks = forward.empty() ? 0 : forward[0].size();
  int micro_batches = 0;
  for (const Slot& s : slots[0]) micro_batches = std::max(micro_batches, s.micro_batch + 1);
  // Virtual stage v = chunk * ranks + rank; when its forward and backward of each micro-batch ended.
  const size_t stages = ranks * chunks, m = static_cast<size_t>(micro_batches);
  std::vector<Seconds> forward_end(stages * m, -1), backward_end(stages * m, -1);
  std::vector<size_t> next(ranks, 0);
  std::vector<Seconds> clock(ranks, 0), busy(ranks, 0);

  auto ready = [&](size_t rank, const Slot& s) -> Seconds { // -1: not yet
    const size_t stage = static_cast<size_t>(s.chunk) * ranks + rank, mb = static_cast<size_t>(s.micro_batch);
    if (s.pass == Pass::Forward) return stage == 0 ? 0 : forward_end[(stage - 1) * m + mb];
    if (stage + 1 == stages) return forward_end[stage * m + mb];
    return backward_end[(stage + 1) * m + mb];
  };
  auto arrival = [&](size_t rank, const Slot& s, Seconds at) {
    const size_t stage = static_cast<size_t>(s.chunk) * ranks + rank;
    const bool arrives = ranks > 1 && (s.pass == Pass::Forward ? stage > 0 : stage + 1 < stages);
    if (!arrives) return std::max(clock[rank], at);
    return options.beside ? std::max(clock[rank], at + options.transfer) : std::max(clock[rank], at) + options.transfer;
  };
  // The backward that runs beside a forward: the slot right behind it, once the warm-up is over.
  auto partner = [&](size_t rank, size_t slot) -> const Slot* {
    if (options.saved.empty() || slots[rank][slot].pass != Pass::Forward || slot + 1 >= slots[rank].size()) return nullptr;
    const int warm_up = program::warm_up_forwards(static_cast<int>(ranks), static_cast<int>(rank), static_cast<int>(chunks), micro_batches, 0, 1);
    if (static_cast<int>(slot) < warm_up) return nullptr;
    const Slot& b = slots[rank][slot + 1];
    const bool same = b.chunk == slots[rank][slot].chunk && b.micro_batch == slots[rank][slot].micro_batch;
    return b.pass == Pass::Backward && !same ? &b : nullptr;
  };
  bool progress = true;
  while (progress) {
    progress = false;
    for (size_t r = 0; r < ranks; ++r) {
      while (next[r] < slots[r].size()) {
        const Slot& s = slots[r][next[r]];
        const size_t stage = static_cast<size_t>(s.chunk) * ranks + r, mb = static_cast<size_t>(s.micro_batch);
        const Seconds at = ready(r, s);
        if (at < 0) break;
        Seconds begin = arrival(r, s, at);
        Seconds length = (s.pass == Pass::Forward ? forward : backward)[r][static_cast<size_t>(s.chunk)];
        if (const Slot* b = partner(r, next[r])) {
          const Seconds other = ready(r, *b);
          if (other < 0) break;
          begin = std::max(begin, arrival(r, *b, other));
        } else if (s.pass == Pass::Backward && next[r] > 0) {
          const Slot& before = slots[r][next[r] - 1];
          if (partner(r, next[r] - 1)) length -= options.saved[r][static_cast<size_t>(before.chunk)][static_cast<size_t>(s.chunk)];
        }
        clock[r] = begin + length;
        busy[r] += length;
        (s.pass == Pass::Forward ? forward_end : backward_end)[stage * m + mb] = clock[r];
        ++next[r];
        progress = true;
      }
    }
  }
  PipelineTime out;
  for (size_t r = 0; r < ranks; ++r) {
    if (next[r] != slots[r].size())
      throw Error(ErrorCode::Internal, "pipeline schedule deadlocks: a rank waits for a pass that never runs");
    out.total = std::max(out.total, clock[r]);
    out.busy = std::max(out.busy, busy[r]);
  }
  out.ends = clock;
  return out;
}

} // namespace gdn::cost
