#include "plan/bound.h"

#include <algorithm>

namespace gdn::plan {

using config::Granularity;
using program::Pass;

Extent Extent::then(const Extent& next) const {
  return {retained + next.retained, std::max(forward, retained + next.forward),
          std::max(next.backward, backward - next.retained), forward_time + next.forward_time,
          backward_time + next.backward_time};
}

Extent extent_of(const program::UnitSummary& s, const cost::UnitTime& t, Seconds hidden_forward, Seconds hidden_backward) {
  auto peak = [](const program::PassSummary& p) {
    return std::max(p.run.event >= 0 ? p.run.bytes : 0, p.replay.event >= 0 ? p.replay.bytes : 0);
  };
  return {s.retained.total(), peak(s.forward), peak(s.backward), t.forward - hidden_forward, t.backward + t.replay - hidden_backward};
}

std::vector<Moment> fullest_moments(int pp, int rank, int vp, int micro_batches, int ahead) {
  std::vector<Moment> moments;
  std::vector<int> now(static_cast<size_t>(vp), 0);
  auto covers = [](const Moment& a, const Moment& b) {
    if (a.chunk != b.chunk) return false;
    for (size_t c = 0; c < a.in_flight.size(); ++c)
      if (a.in_flight[c] < b.in_flight[c]) return false;
    return true;
  };
  for (const program::Slot& s : program::one_f_one_b(pp, rank, vp, program::steady_micro_batches(pp, vp, micro_batches, 0, ahead), 0, ahead)) {
    int& mine = now[static_cast<size_t>(s.chunk)];
    if (s.pass == Pass::Backward) --mine; // its own share is in the chunk's backward peak
    const Moment m{s.chunk, now};
    if (s.pass == Pass::Forward) ++mine;
    if (std::any_of(moments.begin(), moments.end(), [&](const Moment& seen) { return covers(seen, m); })) continue;
    std::erase_if(moments, [&](const Moment& seen) { return covers(m, seen); });
    moments.push_back(m);
  }
  return moments;
}

namespace {

Extent chunk_extent(const ShapeExtents& shape, const Setting& setting, const model::Chunk& chunk, const std::vector<int>& kind_of) {
  Extent e;
  bool any = false;
  auto add = [&](const Extent& next) {
    e = any ? e.then(next) : next;
    any = true;
  };
  if (chunk.is_first) add(shape.embedding);
  const bool full = setting.granularity == Granularity::Full, uniform = setting.method == "uniform";
  for (std::int64_t i = 0; i < chunk.layers; ++i) {
    const size_t kind = static_cast<size_t>(kind_of[static_cast<size_t>(chunk.first + i)]);
    if (!full || (!uniform && i >= setting.num_layers)) {
      add(shape.kinds[kind]);
      continue;
    }
    Extent layer = shape.full[kind];
    // Inside a group of uniform layers only the first input is kept; the others are made again.
    if (uniform && i % setting.num_layers != 0) layer.retained -= shape.input;
    add(layer);
  }
  if (chunk.is_last) add(shape.head);
  return e;
}

bool same_layers(const model::Chunk& a, const model::Chunk& b, const std::vector<int>& kind_of) {
  return a.layers == b.layers && a.is_first == b.is_first && a.is_last == b.is_last &&
         std::equal(kind_of.begin() + a.first, kind_of.begin() + a.first + a.layers, kind_of.begin() + b.first);
}

} // namespace

Bound lower_bound(const ShapeExtents& shape, const Setting& setting, const std::vector<model::Chunk>& chunks,
                  const std::vector<int>& kind_of, const std::vector<std::vector<Moment>>& moments,
                  const std::vector<Bytes>& state, std::int64_t micro_batches) {
  std::vector<Extent> extent(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    size_t same = i;
    for (size_t j = i; j-- > 0;)
      if (same_layers(chunks[i], chunks[j], kind_of)) {
        same = j;
        break;
      }
    extent[i] = same < i ? extent[same] : chunk_extent(shape, setting, chunks[i], kind_of);
  }
  const size_t pp = state.size(), vp = chunks.size() / pp;
  Bound out;
  Seconds before = 0; // the first micro-batch reaches a rank after, and leaves it before, its neighbours
  for (size_t r = 0; r < pp; ++r) {
    Seconds busy = 0;
    for (size_t c = 0; c < vp; ++c) busy += extent[c * pp + r].forward_time + extent[c * pp + r].backward_time;
    out.step = std::max(out.step, before + busy * static_cast<double>(micro_batches));
    before += extent[r].forward_time + extent[r].backward_time;
    for (const Moment& m : moments[r]) {
      Bytes level = state[r];
      for (size_t c = 0; c < vp; ++c) level += extent[c * pp + r].retained * m.in_flight[c];
      const Extent& e = extent[static_cast<size_t>(m.chunk) * pp + r];
      out.peak = std::max(out.peak, level + std::max(e.forward, e.retained + e.backward));
    }
  }
  return out;
}

} // namespace gdn::plan
