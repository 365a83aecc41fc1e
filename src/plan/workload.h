#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "model/op.h"
#include "model/stages.h"
#include "plan/setting.h"
#include "program/schedule.h"
#include "program/summary.h"
#include "program/trace.h"

namespace gdn::plan {

// One op list under one set of spans, traced once and shared by every equal layer.
struct TracedUnit {
  const model::OpList* list = nullptr;
  std::vector<model::Span> spans = {};
  program::UnitTrace trace = {};
  program::UnitSummary summary = {};
  Bytes offloaded = 0; // bytes that go to the host in forward and come back in backward
};

// Where a unit stands in a chunk: a decoder layer (or several under one span), or an end.
struct PlacedUnit {
  const TracedUnit* unit = nullptr;
  std::int64_t first_layer = -1; // -1: embedding or head
  std::int64_t layers = 0;
};

// Forwards that run ahead of 1F1B: one, where each runs beside the backward of another micro-batch.
inline int forwards_ahead(const config::Run& run) { return run.overlap_moe_expert_parallel_comm ? 1 : 0; }

// The units of a model under a run's stack: op lists by kind, traced on demand under the spans that
// act on them. Both programs build what they count and what they execute here.
class Workload {
public:
  // `model`, `run` and `provider` must outlive the workload; the run's recompute settings are not read.
  Workload(const config::Model& model, const config::Run& run, const model::Provider& provider);

  // Units of one chunk in order, under `setting`.
  std::vector<PlacedUnit> units(const model::Chunk& chunk, const Setting& setting);
  // The op lists of one chunk, each once.
  std::vector<const model::OpList*> lists(const model::Chunk& chunk);
  // The op list of each decoder layer of a chunk, in order.
  std::vector<const model::OpList*> layer_lists(const model::Chunk& chunk);
  // Whether any unit of the model holds an op the module acts on, and on how many decoder layers.
  std::int64_t layers_with(const std::string& module) const;
  // Whether all that the first module acts on is a part of what the second one replays whole.
  bool lies_inside(const std::string& inner, const std::string& outer) const;
  // Throws Error{Usage} when a user span names an op that no layer has (nearest spelling), or no
  // single layer has both its ends.
  void require_known_ops(const Setting& setting) const;

  const config::Model& model() const { return model_; }
  const config::Run& run() const { return run_; }
  const model::Provider& provider() const { return provider_; }

private:
  const model::OpList& layer_list(std::int64_t layer);
  const TracedUnit& traced(const model::OpList& list, std::vector<model::Span> spans, bool input_gradient, bool offloads = false);

  const config::Model& model_;
  const config::Run& run_;
  const model::Provider& provider_;
  std::map<std::pair<config::LayerKind, config::MlpKind>, model::OpList> layers_;
  std::map<std::vector<const model::OpList*>, model::OpList> groups_;
  model::OpList embedding_, head_;
  struct Key {
    const model::OpList* list;
    std::string spans;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, std::unique_ptr<TracedUnit>> traced_;
};

} // namespace gdn::plan
