#include "program/transfers.h"

#include <algorithm>
#include <map>

namespace gdn::program {

std::vector<RunTransfers> transfers(const Program& program, int pp, int rank, int vp, int micro_batches) {
  std::vector<RunTransfers> out(program.runs().size());
  if (pp == 1) return out;
  std::map<int, Transfer> arriving, leaving; // by buffer
  const int last_boundary = pp * vp;         // boundary i lies before chunk i of the model
  auto transfer = [&](int unit, int micro_batch, BufferId local, int boundary, bool gradient, bool to_next) {
    const int id = program.buffer(unit, micro_batch, local);
    const int peer = (rank + (to_next ? 1 : pp - 1)) % pp;
    return Transfer{id, peer, (micro_batch * last_boundary + boundary) * 2 + gradient, program.buffers()[static_cast<size_t>(id)].bytes};
  };
  const auto& units = program.units();
  for (size_t u = 0; u < units.size(); ++u) {
    const UnitTrace& t = *units[u].trace;
    const int chunk = units[u].chunk * pp + rank, unit = static_cast<int>(u);
    const bool first = u == 0 || units[u - 1].chunk != units[u].chunk, last = u + 1 == units.size() || units[u + 1].chunk != units[u].chunk;
    for (int m = 0; m < micro_batches; ++m) {
      auto add = [&](std::map<int, Transfer>& to, BufferId local, int boundary, bool gradient, bool to_next) {
        if (local < 0) return;
        const Transfer x = transfer(unit, m, local, boundary, gradient, to_next);
        to[x.buffer] = x;
      };
      if (first && chunk > 0) {
        add(arriving, t.input, chunk, false, false);
        add(leaving, t.input_gradient, chunk, true, false);
      }
      if (last && chunk + 1 < last_boundary) {
        add(leaving, t.output, chunk + 1, false, true);
        add(arriving, t.output_gradient, chunk + 1, true, true);
      }
    }
  }
  for (size_t r = 0; r < program.runs().size(); ++r) {
    for (int id : program.runs()[r].allocs)
      if (auto it = arriving.find(id); it != arriving.end()) out[r].receives.push_back(it->second);
    for (int id : program.runs()[r].frees)
      if (auto it = leaving.find(id); it != leaving.end()) out[r].sends.push_back(it->second);
  }
  return out;
}

std::vector<Route> routes(const std::vector<RunTransfers>& transfers) {
  std::vector<Route> out;
  auto add = [&](bool sends, const std::vector<Transfer>& messages) {
    for (const Transfer& t : messages) {
      const auto same = [&](const Route& r) { return r.sends == sends && r.peer == t.peer && r.tag % 2 == t.tag % 2; };
      auto it = std::find_if(out.begin(), out.end(), same);
      if (it == out.end()) it = out.insert(out.end(), {sends, t.peer, t.tag, 0});
      it->largest = std::max(it->largest, t.bytes);
    }
  };
  for (const RunTransfers& run : transfers) {
    add(false, run.receives);
    add(true, run.sends);
  }
  return out;
}

} // namespace gdn::program
