#include "program/schedule.h"

#include <algorithm>

#include "core/error.h"

namespace gdn::program {

namespace {

// The k-th chunk pass of an interleaved schedule: groups of micro-batches go through all chunks.
Slot interleaved_slot(int k, Pass pass, int vp, int group, int micro_batches) {
  const int round = k / (group * vp), inside = k % (group * vp);
  const int size = std::min(group, micro_batches - round * group); // the last group may be short
  const int chunk = inside / size;
  return {pass, pass == Pass::Forward ? chunk : vp - 1 - chunk, round * group + inside % size};
}

} // namespace

std::vector<Slot> one_f_one_b(int pp, int rank, int vp, int micro_batches, int group) {
  if (group <= 0) group = pp;
  const int total = micro_batches * vp;
  const int warm_up = vp == 1 ? std::min(total, pp - rank - 1)
                              : std::min(total, 2 * (pp - rank - 1) + (vp - 1) * group);
  std::vector<Slot> slots;
  slots.reserve(2 * static_cast<size_t>(total));
  auto push = [&](int k, Pass pass) {
    slots.push_back(vp == 1 ? Slot{pass, 0, k} : interleaved_slot(k, pass, vp, group, micro_batches));
  };
  for (int k = 0; k < warm_up; ++k) push(k, Pass::Forward);
  for (int k = warm_up; k < total; ++k) {
    push(k, Pass::Forward);
    push(k - warm_up, Pass::Backward);
  }
  for (int k = total - warm_up; k < total; ++k) push(k, Pass::Backward);
  return slots;
}

int steady_micro_batches(int pp, int vp, int micro_batches, int group) {
  if (group <= 0) group = pp;
  if (vp == 1) return std::min(micro_batches, pp + 2);
  // Keep whole groups: warm-up spans at most 2 pp + (vp - 1) group chunk passes, then two rounds.
  const int rounds = (2 * pp + group - 1) / group + 3;
  const int remainder = micro_batches % group;
  const int reduced = rounds * group + remainder;
  return std::min(micro_batches, reduced);
}

void StepPeak::raise(const CategoryBytes& base, const Peak& peak, int at_slot, int at_unit, Pass at_pass) {
  if (peak.event < 0) return;
  Bytes total = base.total() + peak.bytes;
  if (slot >= 0 && total <= bytes) return;
  *this = {total, base + peak.by, at_slot, at_unit, peak.event, at_pass};
}

namespace {

// Attributes that an op's next run overwrites, per unit: whose they are, and whether only the
// attribute keeps them alive.
struct Attributes {
  int micro_batch = -1;
  bool extra = false;
};

class Walker {
public:
  Walker(const std::vector<std::vector<const UnitSummary*>>& chunks, const CategoryBytes& base)
      : chunks_(chunks), level_(base) {
    for (const auto& c : chunks) attributes_.emplace_back(c.size());
  }

  Walk run(const std::vector<Slot>& slots) {
    const Bytes base = level_.total();
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& s = slots[i];
      slot_ = static_cast<int>(i);
      const int n = static_cast<int>(chunks_[static_cast<size_t>(s.chunk)].size());
      for (int u = 0; u < n; ++u) unit(s, s.pass == Pass::Forward ? u : n - 1 - u);
    }
    out_.end_level = level_.total() - base;
    return out_;
  }

private:
  void unit(const Slot& s, int u) {
    const UnitSummary& summary = *chunks_[static_cast<size_t>(s.chunk)][static_cast<size_t>(u)];
    Attributes& a = attributes_[static_cast<size_t>(s.chunk)][static_cast<size_t>(u)];
    if (s.pass == Pass::Forward) {
      pass(summary, summary.forward, Pass::Forward, u, a.extra);
      if (summary.forward.binds) set_extra(summary, a, s.micro_batch, !summary.sticky_crosses);
    } else if (summary.backward.binds) { // a replay binds new attributes
      pass(summary, summary.backward_held, Pass::Backward, u, a.extra);
      set_extra(summary, a, s.micro_batch, true);
    } else if (summary.sticky_crosses && a.micro_batch == s.micro_batch) {
      pass(summary, summary.backward_held, Pass::Backward, u, a.extra);
      set_extra(summary, a, s.micro_batch, true);
    } else {
      pass(summary, summary.backward, Pass::Backward, u, a.extra);
    }
  }

  // Raises the peaks of one pass over the current level and applies its change. Without bindings,
  // attributes kept from before are in the level; with them, segment i still has bytes i, i+1, ...
  void pass(const UnitSummary& summary, const PassSummary& p, Pass phase, int u, bool extra) {
    CategoryBytes base = level_;
    for (size_t i = 0; i < p.segments.size(); ++i) {
      raise(base, p.segments[i].run, u, phase);
      raise(base, p.segments[i].replay, u, Pass::Replay);
      if (extra && p.binds && i < summary.sticky.size()) base[Category::Activations] -= summary.sticky[i];
    }
    level_ += p.delta;
  }

  void raise(const CategoryBytes& base, const Peak& peak, int u, Pass phase) {
    out_.overall.raise(base, peak, slot_, u, phase);
    StepPeak& mine = phase == Pass::Forward ? out_.forward : phase == Pass::Replay ? out_.replay : out_.backward;
    mine.raise(base, peak, slot_, u, phase);
  }

  void set_extra(const UnitSummary& summary, Attributes& a, int micro_batch, bool extra) {
    Bytes bytes = 0;
    for (Bytes b : summary.sticky) bytes += b;
    if (a.extra) level_[Category::Activations] -= bytes;
    if (extra) level_[Category::Activations] += bytes;
    a = {micro_batch, extra};
  }

  const std::vector<std::vector<const UnitSummary*>>& chunks_;
  CategoryBytes level_;
  std::vector<std::vector<Attributes>> attributes_;
  Walk out_;
  int slot_ = 0;
};

} // namespace

Walk walk(const std::vector<std::vector<const UnitSummary*>>& chunks, const std::vector<Slot>& slots,
          const CategoryBytes& base) {
  return Walker(chunks, base).run(slots);
}

} // namespace gdn::program
