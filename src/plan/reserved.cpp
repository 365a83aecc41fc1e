#include "plan/reserved.h"

#include <algorithm>
#include <utility>

namespace gdn::plan {

using program::CachingAllocator;
using program::Pass;

AllocatorScript::AllocatorScript(const program::UnitTrace& t) {
  const int events = static_cast<int>(t.events.size());
  std::vector<std::vector<int>> made(t.events.size()), gone(t.events.size());
  auto live = [&](size_t buffer, int from, int to) {
    const int id = static_cast<int>(buffer);
    if (from >= 0 && from < events && id != t.input && id != t.output_gradient) made[static_cast<size_t>(from)].push_back(id);
    if (to >= 0 && to < events && id != t.output && id != t.input_gradient) gone[static_cast<size_t>(to)].push_back(id);
  };
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const program::Buffer& b = t.buffers[i];
    if (b.external) continue;
    live(i, b.alloc, b.drop < 0 ? b.last : b.drop);
    if (b.drop >= 0 && b.refill >= 0) live(i, b.refill, b.last);
  }
  std::vector<model::StorageId> attribute_of; // which storage each attribute names
  for (int e = 0; e < events; ++e) {
    std::vector<Line>& lines = e < t.forward_end ? forward : backward;
    const program::Event& event = t.events[static_cast<size_t>(e)];
    for (int id : made[static_cast<size_t>(e)]) lines.push_back({Do::Make, id, t.buffers[static_cast<size_t>(id)].bytes});
    // One tensor, but for the empty gradient of a weight beside other buffers.
    const model::Op& op = t.list->ops[static_cast<size_t>(event.op)];
    Bytes weight = 0;
    if (event.step >= 0 && (op.kind == model::OpKind::LmHead || op.kind == model::OpKind::Embedding) &&
        !op.steps[static_cast<size_t>(event.step)].param_grads.empty())
      weight = std::min(event.scratch, op.params[0].elements * size_of(op.params[0].dtype));
    for (Bytes bytes : {event.scratch - weight, weight})
      if (bytes > 0) lines.push_back({Do::Scratch, 0, bytes});
    for (const auto& sticky : t.sticky) {
      if (sticky.event != e) continue;
      const model::StorageId storage = t.list->tensor(t.buffers[static_cast<size_t>(sticky.buffer)].tensor).storage;
      auto it = std::find(attribute_of.begin(), attribute_of.end(), storage);
      if (it == attribute_of.end()) it = attribute_of.insert(it, storage);
      lines.push_back({Do::Bind, static_cast<int>(it - attribute_of.begin()), sticky.buffer});
    }
    for (int id : gone[static_cast<size_t>(e)]) lines.push_back({Do::End, id});
    lines.push_back({Do::OpDone});
  }
  attributes = static_cast<int>(attribute_of.size());
}

namespace {

template <class Use> void for_each_shard(const ReservedInput& in, std::int64_t wanted, Use use) {
  for (const model::StateBuffer& b : in.state) {
    const model::ElementBytes bytes = model::element_bytes(*in.run, b.dtype);
    const std::int64_t shards = in.run->optimizer.distributed ? b.ranks : 1, shard = std::min(wanted, shards - 1);
    const std::int64_t first = b.elements / shards * shard, last = first + b.elements / shards;
    for (const model::BufferSlot& s : b.slots) {
      const std::int64_t overlap = std::min(last, s.offset + s.elements) - std::max(first, s.offset);
      if (overlap > 0) use(overlap, bytes);
    }
  }
}

Bytes on_device(const ReservedInput& in, Bytes optimizer) {
  return static_cast<Bytes>(static_cast<double>(optimizer) * (1 - in.run->optimizer.offload_fraction));
}

// Parameters one by one, then moved into one buffer beside the gradients' and freed; fp32 masters.
void build(CachingAllocator& allocator, const ReservedInput& in, std::int64_t shard) {
  if (in.frozen > 0) allocator.allocate(in.frozen);
  std::vector<int> own;
  for (const model::StateBuffer& b : in.state)
    for (const model::BufferSlot& s : b.slots) own.push_back(allocator.allocate(s.elements * size_of(b.dtype)));
  for (const model::StateBuffer& b : in.state) {
    const model::ElementBytes bytes = model::element_bytes(*in.run, b.dtype);
    allocator.allocate(b.elements * bytes.parameter);
    allocator.allocate(b.elements * bytes.gradient);
  }
  for (int handle : own) allocator.free(handle);
  for_each_shard(in, shard, [&](std::int64_t elements, const model::ElementBytes& bytes) {
    if (bytes.optimizer > 8) allocator.allocate(on_device(in, elements * (bytes.optimizer - 8)));
  });
  for (const model::LibraryBuffer& b : in.library) allocator.allocate(b.bytes);
}

// The first update makes both moments of every tensor of the shard.
void make_moments(CachingAllocator& allocator, const ReservedInput& in, std::int64_t shard) {
  for_each_shard(in, shard, [&](std::int64_t elements, const model::ElementBytes& bytes) {
    const Bytes moments = std::min<Bytes>(8, bytes.optimizer);
    for (int moment = 0; moment < 2; ++moment) allocator.allocate(on_device(in, elements * moments / 2));
  });
}

// Steps of a rank: its slots, each unit of a slot by its script.
class Steps {
public:
  Steps(const ReservedInput& in, const std::map<const TracedUnit*, AllocatorScript>& scripts, CachingAllocator& allocator, int delay)
      : in_(in), allocator_(allocator), delay_(delay) {
    size_t attributes = 0;
    for (const auto& chunk : in.chunks) {
      units_.emplace_back();
      for (const PlacedUnit& u : chunk) {
        const AllocatorScript& script = scripts.at(u.unit);
        units_.back().push_back({&u.unit->trace, &script, attributes});
        attributes += static_cast<size_t>(script.attributes);
      }
    }
    attributes_.assign(attributes, -1);
    int micro_batches = 0;
    for (const program::Slot& s : in.slots) micro_batches = std::max(micro_batches, s.micro_batch + 1);
    for (const auto& chunk : units_) live_.emplace_back(chunk.size() * static_cast<size_t>(micro_batches));
  }

  void run() {
    for (const program::Slot& s : in_.slots) {
      const int n = static_cast<int>(units_[static_cast<size_t>(s.chunk)].size());
      for (int i = 0; i < n; ++i) pass(s, s.pass == Pass::Forward ? i : n - 1 - i);
    }
    settle(0);
  }

private:
  using Handles = std::vector<int>; // of a unit's buffers, -1: not there
  struct Unit {
    const program::UnitTrace* trace;
    const AllocatorScript* script;
    size_t attributes; // its first
  };

  Handles& handles(const program::Slot& s, int unit) {
    const size_t chunk = static_cast<size_t>(s.chunk);
    return live_[chunk][static_cast<size_t>(s.micro_batch) * units_[chunk].size() + static_cast<size_t>(unit)];
  }

  void pass(const program::Slot& s, int unit) {
    const std::vector<Unit>& chunk = units_[static_cast<size_t>(s.chunk)];
    const Unit& u = chunk[static_cast<size_t>(unit)];
    const program::UnitTrace& t = *u.trace;
    const bool forward = s.pass == Pass::Forward, first = unit == 0, last = unit + 1 == static_cast<int>(chunk.size());
    Handles& mine = handles(s, unit);
    if (forward) mine.assign(t.buffers.size(), -1);
    auto at = [&](int id) -> int& { return mine[static_cast<size_t>(id)]; };
    auto make = [&](int id, Bytes bytes) {
      if (at(id) < 0) at(id) = allocator_.allocate(bytes);
    };
    // What the neighbour hands over, or another stage sends.
    auto arrive = [&](int id, bool sent, int neighbour, model::TensorId theirs) {
      if (id < 0) return;
      if (sent) make(id, t.buffers[static_cast<size_t>(id)].bytes);
      else if (theirs >= 0) std::swap(at(id), handles(s, neighbour)[static_cast<size_t>(theirs)]);
    };
    if (forward) arrive(t.input, first, unit - 1, first ? -1 : chunk[static_cast<size_t>(unit) - 1].trace->output);
    else arrive(t.output_gradient, last, unit + 1, last ? -1 : chunk[static_cast<size_t>(unit) + 1].trace->input_gradient);
    auto leave = [&](int id) {
      if (id < 0 || at(id) < 0) return;
      end(at(id));
      at(id) = -1;
    };
    for (const AllocatorScript::Line& line : forward ? u.script->forward : u.script->backward) {
      switch (line.what) {
      case AllocatorScript::Do::Make: make(line.id, line.bytes); break;
      case AllocatorScript::Do::Scratch: release(allocator_.allocate(line.bytes)); break;
      case AllocatorScript::Do::Bind: bind(u.attributes + static_cast<size_t>(line.id), at(static_cast<int>(line.bytes))); break;
      case AllocatorScript::Do::End: leave(line.id); break;
      case AllocatorScript::Do::OpDone: settle(delay_); break;
      }
    }
    // Sent to another stage.
    if (forward && last) leave(t.output);
    if (!forward && first) leave(t.input_gradient);
  }

  // An attribute keeps its tensor until the next binding.
  void bind(size_t attribute, int handle) {
    const int before = attributes_[attribute];
    attributes_[attribute] = handle;
    held_.resize(std::max(held_.size(), static_cast<size_t>(handle) + 1));
    held_[static_cast<size_t>(handle)].by_attribute = true;
    if (before < 0) return;
    Held& old = held_[static_cast<size_t>(before)];
    if (before != handle) old.by_attribute = false;
    if (std::exchange(old.ended, false)) release(before);
  }

  void end(int handle) {
    const size_t i = static_cast<size_t>(handle);
    if (i < held_.size() && held_[i].by_attribute) held_[i].ended = true;
    else release(handle);
  }

  void release(int handle) { waiting_.push_back({handle, now_}); }
  // Frees what was released `delay` ops ago.
  void settle(int delay) {
    ++now_;
    for (; next_ < waiting_.size() && waiting_[next_].second + delay < now_; ++next_) allocator_.free(waiting_[next_].first);
    if (next_ == waiting_.size()) {
      waiting_.clear();
      next_ = 0;
    }
  }

  const ReservedInput& in_;
  CachingAllocator& allocator_;
  int delay_;
  std::vector<std::vector<Unit>> units_; // per chunk
  std::vector<std::vector<Handles>> live_; // per chunk, micro-batch and unit
  std::vector<int> attributes_;            // what each refers to, -1: nothing yet
  struct Held { bool by_attribute = false, ended = false; };
  std::vector<Held> held_;                 // per handle
  std::vector<std::pair<int, int>> waiting_; // handle and the op that released it, from next_ on
  size_t next_ = 0;
  int now_ = 0; // ops so far
};

} // namespace

ReservedSimulation::ReservedSimulation(const ReservedInput& input, program::AllocatorOptions options) : input_(input), options_(options) {
  for (const auto& chunk : input.chunks)
    for (const PlacedUnit& u : chunk) scripts_.try_emplace(u.unit, u.unit->trace);
}

Bytes ReservedSimulation::peak(std::int64_t shard, int delay) {
  if (!built_ || built_shard_ != shard) {
    built_.emplace(options_);
    build(*built_, input_, shard);
    built_shard_ = shard;
  }
  CachingAllocator allocator = *built_;
  Steps steps(input_, scripts_, allocator, delay);
  steps.run();
  make_moments(allocator, input_, shard);
  steps.run();
  return allocator.peak_reserved();
}

} // namespace gdn::plan
