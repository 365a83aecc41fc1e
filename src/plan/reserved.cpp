#include "plan/reserved.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <tuple>

namespace gdn::plan {

using program::CachingAllocator;
using program::Pass;

namespace {

// Buffers of one traced unit by the event before which they are made and after which they go.
struct Lifetimes {
  std::vector<std::vector<int>> made, gone;
  explicit Lifetimes(const program::UnitTrace& t) : made(t.events.size()), gone(t.events.size()) {
    for (size_t i = 0; i < t.buffers.size(); ++i) {
      const program::Buffer& b = t.buffers[i];
      if (b.external) continue;
      auto live = [&](int from, int to) {
        if (from >= 0 && from < static_cast<int>(made.size())) made[static_cast<size_t>(from)].push_back(static_cast<int>(i));
        if (to >= 0 && to < static_cast<int>(gone.size())) gone[static_cast<size_t>(to)].push_back(static_cast<int>(i));
      };
      if (b.drop < 0) live(b.alloc, b.last);
      else {
        live(b.alloc, b.drop);
        if (b.refill >= 0) live(b.refill, b.last);
      }
    }
  }
};

class Replay {
public:
  Replay(const ReservedInput& input, program::AllocatorOptions options) : in_(input), allocator_(options) {
    for (const auto& chunk : in_.chunks)
      for (const PlacedUnit& u : chunk) lifetimes_.try_emplace(u.unit, u.unit->trace);
  }

  Bytes run() {
    build();
    step();
    states();
    step();
    return allocator_.peak_reserved();
  }

private:
  using Handles = std::vector<int>;

  // Parameters one by one, then moved into one buffer beside the gradients' and freed; fp32 masters.
  void build() {
    if (in_.frozen > 0) allocator_.allocate(in_.frozen);
    std::vector<int> own;
    for (const model::StateBuffer& b : in_.state)
      for (const model::BufferSlot& s : b.slots) own.push_back(allocator_.allocate(s.elements * size_of(b.dtype)));
    for (const model::StateBuffer& b : in_.state) {
      const model::ElementBytes bytes = model::element_bytes(*in_.run, b.dtype);
      allocator_.allocate(b.elements * bytes.parameter);
      allocator_.allocate(b.elements * bytes.gradient);
    }
    for (int handle : own) allocator_.free(handle);
    for_each_shard([&](std::int64_t elements, const model::ElementBytes& bytes) {
      if (bytes.optimizer > 8) allocator_.allocate(on_device(elements * (bytes.optimizer - 8)));
    });
    for (const model::LibraryBuffer& b : in_.library) allocator_.allocate(b.bytes);
  }

  // The first update makes both moments of every tensor of the shard.
  void states() {
    for_each_shard([&](std::int64_t elements, const model::ElementBytes& bytes) {
      const Bytes moments = std::min<Bytes>(8, bytes.optimizer);
      for (int moment = 0; moment < 2; ++moment) allocator_.allocate(on_device(elements * moments / 2));
    });
  }

  Bytes on_device(Bytes optimizer) const {
    return static_cast<Bytes>(static_cast<double>(optimizer) * (1 - in_.run->optimizer.offload_fraction));
  }

  template <class Use> void for_each_shard(Use use) const {
    for (const model::StateBuffer& b : in_.state) {
      const std::int64_t shards = in_.run->optimizer.distributed ? b.ranks : 1, shard = std::min(in_.shard, shards - 1);
      const std::int64_t first = b.elements / shards * shard, last = first + b.elements / shards;
      for (const model::BufferSlot& s : b.slots) {
        const std::int64_t overlap = std::min(last, s.offset + s.elements) - std::max(first, s.offset);
        if (overlap > 0) use(overlap, model::element_bytes(*in_.run, b.dtype));
      }
    }
  }

  void step() {
    for (const program::Slot& s : in_.slots) {
      const int n = static_cast<int>(in_.chunks[static_cast<size_t>(s.chunk)].size());
      for (int i = 0; i < n; ++i) pass(s, s.pass == Pass::Forward ? i : n - 1 - i);
    }
    settle(0);
  }

  Handles& handles(const program::Slot& s, int unit) { return live_[{s.chunk, s.micro_batch, unit}]; }

  void pass(const program::Slot& s, int unit) {
    const std::vector<PlacedUnit>& chunk = in_.chunks[static_cast<size_t>(s.chunk)];
    const program::UnitTrace& t = chunk[static_cast<size_t>(unit)].unit->trace;
    const Lifetimes& life = lifetimes_.at(chunk[static_cast<size_t>(unit)].unit);
    const bool forward = s.pass == Pass::Forward, first = unit == 0, last = unit + 1 == static_cast<int>(chunk.size());
    Handles& mine = handles(s, unit);
    if (forward) mine.assign(t.buffers.size(), -1);
    auto at = [&](int id) -> int& { return mine[static_cast<size_t>(id)]; };
    auto make = [&](int id) { if (at(id) < 0) at(id) = allocator_.allocate(t.buffers[static_cast<size_t>(id)].bytes); };
    // What the neighbour hands over, or another stage sends.
    if (forward && t.input >= 0) {
      if (first) make(t.input);
      else std::swap(at(t.input), handles(s, unit - 1)[static_cast<size_t>(chunk[static_cast<size_t>(unit) - 1].unit->trace.output)]);
    }
    if (!forward && t.output_gradient >= 0) {
      if (last) make(t.output_gradient);
      else if (int theirs = chunk[static_cast<size_t>(unit) + 1].unit->trace.input_gradient; theirs >= 0)
        std::swap(at(t.output_gradient), handles(s, unit + 1)[static_cast<size_t>(theirs)]);
    }
    const int from = forward ? 0 : t.forward_end, to = forward ? t.forward_end : static_cast<int>(t.events.size());
    for (int e = from; e < to; ++e) {
      for (int id : life.made[static_cast<size_t>(e)])
        if (id != t.input && id != t.output_gradient) make(id);
      use_scratch(t, t.events[static_cast<size_t>(e)]);
      for (const auto& sticky : t.sticky)
        if (sticky.event == e) bind({s.chunk, unit, t.list->tensor(t.buffers[static_cast<size_t>(sticky.buffer)].tensor).storage}, at(sticky.buffer));
      for (int id : life.gone[static_cast<size_t>(e)])
        if (id != t.output && id != t.input_gradient && at(id) >= 0) {
          end(at(id));
          at(id) = -1;
        }
      settle(in_.delay);
    }
    auto leave = [&](int id) { // sent to another stage
      if (id < 0 || at(id) < 0) return;
      end(at(id));
      at(id) = -1;
    };
    if (forward && last) leave(t.output);
    if (!forward && first) leave(t.input_gradient);
  }

  // One tensor, but for the empty gradient of a weight beside other buffers.
  void use_scratch(const program::UnitTrace& t, const program::Event& event) {
    const model::Op& op = t.list->ops[static_cast<size_t>(event.op)];
    Bytes weight = 0;
    if (event.step >= 0 && (op.kind == model::OpKind::LmHead || op.kind == model::OpKind::Embedding) &&
        !op.steps[static_cast<size_t>(event.step)].param_grads.empty())
      weight = std::min(event.scratch, op.params[0].elements * size_of(op.params[0].dtype));
    for (Bytes bytes : {event.scratch - weight, weight})
      if (bytes > 0) release(allocator_.allocate(bytes));
  }

  // An attribute keeps its tensor until the next binding.
  using Attribute = std::tuple<int, int, int>;
  void bind(Attribute attribute, int handle) {
    auto [it, fresh] = attributes_.try_emplace(attribute, handle);
    if (fresh) return;
    const int before = it->second;
    it->second = handle;
    if (ended_.erase(before)) release(before);
  }

  void end(int handle) {
    for (const auto& [attribute, bound] : attributes_)
      if (bound == handle) {
        ended_.insert(handle);
        return;
      }
    release(handle);
  }

  void release(int handle) { waiting_.push_back({handle, now_}); }
  // Frees what was released `delay` ops ago.
  void settle(int delay) {
    ++now_;
    while (!waiting_.empty() && waiting_.front().second + delay < now_) {
      allocator_.free(waiting_.front().first);
      waiting_.pop_front();
    }
  }

  const ReservedInput& in_;
  CachingAllocator allocator_;
  std::map<const TracedUnit*, Lifetimes> lifetimes_;
  std::map<std::tuple<int, int, int>, Handles> live_;
  std::map<Attribute, int> attributes_;
  std::set<int> ended_;
  std::deque<std::pair<int, int>> waiting_;
  int now_ = 0; // ops so far
};

} // namespace

Bytes simulate_reserved(const ReservedInput& input, program::AllocatorOptions options) {
  return Replay(input, options).run();
}

} // namespace gdn::plan
