#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/provider.h"
#include "model/span.h"
#include "program/trace.h"

// Shapes of a search differ in sizes more often than in structure: which op runs when, and which buffer lives
// how long, is traced once for each structure and set of spans, and sized for every shape.
namespace gdn::plan {

// A provider that asks another one about each op of one list once.
class RememberedWork : public model::Provider {
public:
  // Both must outlive this.
  RememberedWork(const model::Provider& provider, const model::OpList& list);
  std::string_view name() const override { return provider_.name(); }
  model::Work work(const model::OpList& list, const model::Op& op, int step) const override;
  Bytes update_traffic(const model::StateBytes& state, std::int64_t ranks, std::int64_t shards) const override {
    return provider_.update_traffic(state, ranks, shards);
  }

private:
  const model::Provider& provider_;
  const model::OpList& list_;
  struct Known { bool known = false; model::Work work = {}; };
  mutable std::vector<std::vector<Known>> known_; // per op: its forward, then its steps
};

// Not for several threads at once.
class TraceTemplates {
public:
  // Traces of lists of one structure by the spans' key.
  using Traces = std::map<std::uint32_t, program::UnitTrace>;

  // Of all lists that differ from this one in sizes and attributes only.
  Traces& of(const model::OpList& list, bool input_gradient);

private:
  std::unordered_map<std::string, Traces> known_;
};

// The trace of `list` under `spans`, which have `key` in `traces` and are asked for where it is new: valid until the
// next call for the same key.
template <class Spans>
program::UnitTrace& sized_trace(TraceTemplates::Traces& traces, std::uint32_t key, const model::OpList& list, Spans spans,
                                const model::Provider& provider, const program::TraceOptions& options) {
  auto [it, fresh] = traces.try_emplace(key);
  program::UnitTrace& t = it->second;
  if (fresh) {
    t = program::trace(list, spans(), provider, options);
    return t;
  }
  t.list = &list;
  for (program::Buffer& b : t.buffers) {
    const model::Tensor& tensor = list.tensor(b.tensor);
    b.bytes = b.gradient ? tensor.bytes() : list.storages[static_cast<size_t>(tensor.storage)].bytes;
  }
  for (program::Event& e : t.events) e.scratch = provider.work(list, list.ops[static_cast<size_t>(e.op)], e.step).scratch;
  return t;
}

} // namespace gdn::plan
