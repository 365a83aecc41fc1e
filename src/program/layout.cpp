#include "program/layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace gdn::program {

namespace {

struct Life {
  int first = 0, last = 0; // runs, both included
};

// What shares one offset: the lives of one buffer (or one op's scratch) in all micro-batches,
// except those that overlap in time, which get copies of their own.
struct Block {
  Bytes bytes = 0;
  Bytes offset = -1;
  std::vector<Life> lives = {}; // ascending, disjoint

  bool meets(const Block& other) const {
    for (size_t i = 0, j = 0; i < lives.size() && j < other.lives.size();) {
      const Life &a = lives[i], &b = other.lives[j];
      if (a.first <= b.last && b.first <= a.last) return true;
      if (a.last < b.last) ++i;
      else ++j;
    }
    return false;
  }
};

class Packer {
public:
  Packer(const Program& program, const LayoutOptions& options) : program_(program), options_(options) {}

  Layout run() {
    collect();
    place();
    Layout out;
    out.guard = options_.guard;
    const auto& runs = program_.runs();
    out.allocs.resize(runs.size());
    out.scratch.assign(runs.size(), -1);
    for (size_t r = 0; r < runs.size(); ++r) {
      for (int block : alloc_block_[r]) out.allocs[r].push_back(blocks_[static_cast<size_t>(block)].offset);
      if (scratch_block_[r] >= 0) out.scratch[r] = blocks_[static_cast<size_t>(scratch_block_[r])].offset;
    }
    out.extent = extent_;
    return out;
  }

private:
  // (unit, local buffer or event, which life of it; scratch apart) -> copies, in order of first use.
  using Key = std::tuple<int, int, int, bool>;

  void collect() {
    const auto& runs = program_.runs();
    alloc_block_.resize(runs.size());
    scratch_block_.assign(runs.size(), -1);
    std::vector<int> last = last_runs();
    std::vector<int> life(program_.buffers().size(), 0);
    size_t n = 0;
    for (size_t r = 0; r < runs.size(); ++r) {
      for (int id : runs[r].allocs) {
        const Program::Buffer& b = program_.buffers()[static_cast<size_t>(id)];
        const Key key{b.unit, b.local, life[static_cast<size_t>(id)]++, false};
        alloc_block_[r].push_back(join(key, b.bytes, {static_cast<int>(r), last[n++]}));
      }
      const UnitTrace& t = *program_.units()[static_cast<size_t>(runs[r].unit)].trace;
      if (Bytes scratch = t.events[static_cast<size_t>(runs[r].event)].scratch; scratch > 0)
        scratch_block_[r] = join({runs[r].unit, runs[r].event, 0, true}, scratch, {static_cast<int>(r), static_cast<int>(r)});
    }
  }

  // The last run of every life, in order of allocation.
  std::vector<int> last_runs() const {
    const auto& runs = program_.runs();
    std::vector<int> last, open(program_.buffers().size(), -1);
    for (size_t r = 0; r < runs.size(); ++r) {
      for (int id : runs[r].allocs) {
        open[static_cast<size_t>(id)] = static_cast<int>(last.size());
        last.push_back(static_cast<int>(runs.size()) - 1);
      }
      for (int id : runs[r].frees) last[static_cast<size_t>(open[static_cast<size_t>(id)])] = static_cast<int>(r);
    }
    return last;
  }

  int join(const Key& key, Bytes bytes, Life life) {
    std::vector<int>& copies = copies_[key];
    for (int c : copies) {
      Block& b = blocks_[static_cast<size_t>(c)];
      if (b.lives.back().last < life.first) {
        b.lives.push_back(life);
        return c;
      }
    }
    copies.push_back(static_cast<int>(blocks_.size()));
    blocks_.push_back({.bytes = bytes, .lives = {life}});
    return copies.back();
  }

  void place() {
    std::vector<size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const Block &x = blocks_[a], &y = blocks_[b];
      return std::tuple(-x.bytes, x.lives.front().first, a) < std::tuple(-y.bytes, y.lives.front().first, b);
    });
    std::vector<size_t> placed; // by offset
    for (size_t i : order) {
      Block& b = blocks_[i];
      b.offset = room_for(b, placed);
      auto at = std::upper_bound(placed.begin(), placed.end(), b.offset,
                                 [&](Bytes offset, size_t p) { return offset < blocks_[p].offset; });
      placed.insert(at, i);
      extent_ = std::max(extent_, b.offset + b.bytes + options_.guard);
    }
  }

  // The lowest payload offset at which `b`, guards included, touches none of those alive with it.
  Bytes room_for(const Block& b, const std::vector<size_t>& placed) const {
    Bytes offset = round_up(options_.guard, options_.alignment);
    for (size_t p : placed) {
      const Block& other = blocks_[p];
      if (other.offset + other.bytes + 2 * options_.guard <= offset) continue; // wholly below
      if (!b.meets(other)) continue;
      if (offset + b.bytes + 2 * options_.guard <= other.offset) break; // fits before it
      offset = std::max(offset, round_up(other.offset + other.bytes + 2 * options_.guard, options_.alignment));
    }
    return offset;
  }

  const Program& program_;
  const LayoutOptions& options_;
  std::map<Key, std::vector<int>> copies_;
  std::vector<Block> blocks_;
  std::vector<std::vector<int>> alloc_block_; // [run][i]
  std::vector<int> scratch_block_;            // [run]
  Bytes extent_ = 0;
};

} // namespace

Layout lay_out(const Program& program, const LayoutOptions& options) { return Packer(program, options).run(); }

} // namespace gdn::program
