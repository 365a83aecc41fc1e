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

int warm_up_forwards(int pp, int rank, int vp, int micro_batches, int group, int ahead) {
  if (group <= 0) group = pp;
  const int stages = pp - rank - 1;
  return std::min(micro_batches * vp, vp == 1 ? stages + ahead : 2 * stages + (vp - 1) * group + ahead);
}

std::vector<Slot> one_f_one_b(int pp, int rank, int vp, int micro_batches, int group, int ahead) {
  if (group <= 0) group = pp;
  const int total = micro_batches * vp, warm_up = warm_up_forwards(pp, rank, vp, micro_batches, group, ahead);
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

int steady_micro_batches(int pp, int vp, int micro_batches, int group, int ahead) {
  if (group <= 0) group = pp;
  if (vp == 1) return std::min(micro_batches, pp + 2 + ahead);
  // Keep whole groups: warm-up spans at most 2 pp + (vp - 1) group chunk passes, then two rounds.
  const int rounds = (2 * pp + ahead + group - 1) / group + 3;
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

// What an attribute refers to: generation 0 of a micro-batch, or a replay's; and what it alone keeps.
struct Bound {
  int micro_batch = -1;
  bool generation0 = false;
  CategoryBytes extra = {};
};

// Bytes that an attribute alone keeps during events [from, until] of a pass.
struct Extra {
  int from = 0, until = 0;
  CategoryBytes bytes = {};
};

class Walker {
public:
  Walker(const std::vector<std::vector<const UnitSummary*>>& chunks, const CategoryBytes& base)
      : chunks_(chunks), level_(base) {
    for (const auto& c : chunks) {
      bound_.emplace_back();
      for (const UnitSummary* u : c) bound_.back().emplace_back(u->attributes.size());
    }
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
    std::vector<Bound>& bound = bound_[static_cast<size_t>(s.chunk)][static_cast<size_t>(u)];
    const bool forward = s.pass == Pass::Forward;
    const PassSummary& pass = forward ? summary.forward : summary.backward;
    std::vector<Extra> extras;
    for (size_t i = 0; i < bound.size(); ++i) {
      const Attribute& a = summary.attributes[i];
      Bound& b = bound[i];
      const int bound_at = (forward ? a.forward : a.backward).bound;
      const int until = bound_at < 0 ? static_cast<int>(pass.levels.size()) : bound_at;
      const bool own = !forward && b.generation0 && b.micro_batch == s.micro_batch && a.held.total() > 0;
      if (own) extras.push_back({a.own_end + 1, until, a.held});
      else if (b.extra.total() > 0) extras.push_back({0, until, b.extra});
      level_ -= b.extra;
      if (bound_at >= 0) b = {s.micro_batch, forward, (forward ? a.forward : a.backward).after};
      else if (own) b.extra = a.held;
    }
    raise(pass, extras, u, s.pass);
    level_ += pass.delta;
    for (const Bound& b : bound) level_ += b.extra;
  }

  // Raises the peaks of one pass over the level without this unit's attributes.
  void raise(const PassSummary& pass, const std::vector<Extra>& extras, int u, Pass phase) {
    if (extras.empty()) {
      raise(pass.run, u, phase);
      raise(pass.replay, u, Pass::Replay);
      return;
    }
    // Most passes of a steady period cannot beat what was seen, whichever event they add to.
    Bytes most = level_.total();
    for (const Extra& x : extras) most += x.bytes.total();
    auto beaten = [&](const StepPeak& seen, const Peak& peak) { return peak.event < 0 || (seen.slot >= 0 && most + peak.bytes <= seen.bytes); };
    if (beaten(phase == Pass::Forward ? out_.forward : out_.backward, pass.run) && beaten(out_.replay, pass.replay)) return;
    for (size_t e = 0; e < pass.levels.size(); ++e) {
      CategoryBytes level = pass.levels[e];
      for (const Extra& x : extras)
        if (static_cast<int>(e) >= x.from && static_cast<int>(e) <= x.until) level += x.bytes;
      raise({level.total(), level, pass.first_event + static_cast<int>(e)}, u, pass.replayed[e] ? Pass::Replay : phase);
    }
  }

  void raise(const Peak& peak, int u, Pass phase) {
    out_.overall.raise(level_, peak, slot_, u, phase);
    StepPeak& mine = phase == Pass::Forward ? out_.forward : phase == Pass::Replay ? out_.replay : out_.backward;
    mine.raise(level_, peak, slot_, u, phase);
  }

  const std::vector<std::vector<const UnitSummary*>>& chunks_;
  CategoryBytes level_;
  std::vector<std::vector<std::vector<Bound>>> bound_; // per chunk, unit and attribute
  Walk out_;
  int slot_ = 0;
};

} // namespace

Walk walk(const std::vector<std::vector<const UnitSummary*>>& chunks, const std::vector<Slot>& slots,
          const CategoryBytes& base) {
  return Walker(chunks, base).run(slots);
}

} // namespace gdn::program
