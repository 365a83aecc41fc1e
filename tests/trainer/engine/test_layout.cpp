#include <algorithm>
#include <map>
#include <set>

#include <doctest/doctest.h>

#include "fixture.h"

using namespace gdn;
using namespace gdn::trainer;

namespace {

struct Placed {
  Bytes first, last; // bytes, guards included, last excluded
  int buffer;
};

} // namespace

TEST_CASE("buffers alive at the same time never overlap; every payload is aligned; the extent holds all") {
  CpuDevice device;
  const config::Run run = fixture::run(3);
  const config::Model model = fixture::hybrid();
  plan::Workload workload(model, run, device.provider());
  for (const auto& modules : std::vector<std::vector<std::string>>{{}, {"gdn_norm_out"}, {"gdn_qkv", "moe"}}) {
    const program::Program p = step_program(workload, fixture::modules(modules), 3);
    const program::Layout layout = program::lay_out(p, {256, 64});
    std::map<int, Placed> live;
    Bytes peak = 0;
    for (size_t r = 0; r < p.runs().size(); ++r) {
      const auto& run_line = p.runs()[r];
      auto place = [&](Bytes offset, Bytes bytes, int id) {
        CHECK(offset % 256 == 0);
        const Placed mine{offset - 64, offset + bytes + 64, id};
        CHECK(mine.first >= 0);
        CHECK(mine.last <= layout.extent);
        bool apart = true;
        for (const auto& [other, placed] : live) apart = apart && (mine.last <= placed.first || placed.last <= mine.first);
        CHECK(apart);
        live[id] = mine;
      };
      for (size_t i = 0; i < run_line.allocs.size(); ++i)
        place(layout.allocs[r][i], p.buffers()[static_cast<size_t>(run_line.allocs[i])].bytes, run_line.allocs[i]);
      if (Bytes scratch = run_line.by[Category::Workspace]) {
        REQUIRE(layout.scratch[r] >= 0);
        place(layout.scratch[r], scratch, -1);
        live.erase(-1);
      }
      peak = std::max(peak, run_line.level);
      for (int id : run_line.frees) live.erase(id);
    }
    CHECK(live.empty());
    // Guards and alignment apart, packing loses little: 320 bytes for each of some 200 live buffers.
    CHECK(layout.extent < peak + peak / 5 + 200 * 320);
  }
}

TEST_CASE("every micro-batch finds its buffers at the same addresses") {
  CpuDevice device;
  const config::Run run = fixture::run(3);
  const config::Model model = fixture::hybrid();
  plan::Workload workload(model, run, device.provider());
  const program::Program p = step_program(workload, fixture::modules({"gdn_qkv"}), 3);
  const program::Layout layout = program::lay_out(p);
  std::map<std::pair<int, int>, std::set<Bytes>> offsets; // (unit, local) -> where it lay
  for (size_t r = 0; r < p.runs().size(); ++r)
    for (size_t i = 0; i < p.runs()[r].allocs.size(); ++i) {
      const auto& b = p.buffers()[static_cast<size_t>(p.runs()[r].allocs[i])];
      offsets[{b.unit, b.local}].insert(layout.allocs[r][i]);
    }
  size_t moving = 0;
  for (const auto& [key, at] : offsets) {
    const auto& u = p.units()[static_cast<size_t>(key.first)];
    const std::string name = u.trace->buffer_name(key.second);
    // Attributes live until the next micro-batch overwrites them: two copies take turns.
    const bool attribute = name == "probs" || name == "map";
    CAPTURE(name);
    CHECK(at.size() == (attribute ? 2 : 1));
    moving += at.size() > 1;
  }
  CHECK(moving == 4); // two mixture layers
}
