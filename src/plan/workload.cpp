#include "plan/workload.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"
#include "model/concat.h"
#include "model/spans.h"
#include "model/stack_lists.h"
#include "program/offload.h"

namespace gdn::plan {

using config::Granularity;
using model::OpList;
using model::Span;

Workload::Workload(const config::Model& model, const config::Run& run, const model::Provider& provider)
    : model_(model), run_(run), provider_(provider),
      embedding_(model::embedding_unit(model, run)), head_(model::head_unit(model, run)) {
  for (std::int64_t i = 0; i < model.layers(); ++i) layer_list(i);
}

const OpList& Workload::layer_list(std::int64_t layer) {
  const auto key = std::pair(model_.mixers[static_cast<size_t>(layer)], model_.mlps[static_cast<size_t>(layer)]);
  auto it = layers_.find(key);
  if (it == layers_.end())
    it = layers_.emplace(key, model::decoder_layer(model_, run_, key.first, key.second)).first;
  return it->second;
}

namespace {

// Ops whose saved tensors a run's offload takes: all of a layer (cpu_offloading), or those of the named
// modules. GDN layers have no hook for the latter.
program::OffloadRule offload_rule(const config::Run& run) {
  program::OffloadRule rule;
  if (run.cpu_offloading) {
    rule.op = [](const model::Op&) { return true; };
    return rule;
  }
  static const std::vector<std::pair<std::string_view, std::string_view>> ops{
      {"core_attn", "core_attention"}, {"attn_proj", "linear_proj"}, {"qkv_linear", "linear_qkv"}, {"attn_norm", "input_layernorm"},
      {"mlp_norm", "pre_mlp_layernorm"}, {"expert_fc1", "expert_fc1"}, {"moe_act", "expert_act"}, {"fused_group_mlp", "expert_fc1"},
      {"fused_group_mlp", "expert_act"}, {"fused_group_mlp", "expert_fc2"}};
  rule.op = [&run](const model::Op& op) {
    return std::any_of(ops.begin(), ops.end(), [&](const auto& entry) {
      return entry.second == op.name && std::find(run.offload_modules.begin(), run.offload_modules.end(), entry.first) != run.offload_modules.end();
    });
  };
  rule.smallest = run.settings.min_offloaded_tensor_size * size_of(run.dtype);
  rule.fraction = run.settings.activation_offload_fraction;
  return rule;
}

} // namespace

const TracedUnit& Workload::traced(const OpList& list, std::vector<Span> spans, bool input_gradient, bool offloads) {
  std::string key = input_gradient ? "" : "no input gradient|";
  if (offloads) key += "offloads|";
  for (const Span& s : spans) key += fmt::format("{}:{}-{}:{}:{}|", s.name, s.first, s.last, static_cast<int>(s.kind), s.hook);
  std::unique_ptr<TracedUnit>& cached = traced_[{&list, std::move(key)}];
  if (!cached) {
    auto unit = std::make_unique<TracedUnit>(); // kept only when tracing did not throw
    unit->list = &list;
    unit->spans = std::move(spans);
    program::TraceOptions options;
    options.input_gradient = input_gradient;
    unit->trace = program::trace(list, unit->spans, provider_, options);
    if (offloads) unit->offloaded = program::offload(unit->trace, offload_rule(run_));
    unit->summary = program::summarise(unit->trace);
    cached = std::move(unit);
  }
  return *cached;
}

std::vector<PlacedUnit> Workload::units(const model::Chunk& chunk, const Setting& setting) {
  std::vector<PlacedUnit> out;
  struct Seen { const OpList* first; const TracedUnit* second; bool offloads; };
  std::vector<Seen> seen; // equal layers are looked up once
  const bool full = setting.granularity == Granularity::Full;
  auto spans_of = [&](const OpList& list) {
    // Under full granularity a module list is inert; native's cheap rebuilds stay on everywhere.
    return full ? model::spans_for(list, {}, {}, run_.stack) : model::spans_for(list, setting.modules, setting.user_spans, run_.stack);
  };
  if (chunk.is_first) out.push_back({&traced(embedding_, {}, false)});
  for (std::int64_t i = 0; i < chunk.layers;) {
    const std::int64_t layer = chunk.first + i;
    const bool block = full && setting.method == "block";
    if (!full || (block && i >= setting.num_layers)) {
      const OpList& list = layer_list(layer);
      const bool offloads = run_.fine_grained_offload || (run_.cpu_offloading && layer < run_.cpu_offloading_num_layers);
      auto it = std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.first == &list && s.offloads == offloads; });
      if (it == seen.end()) it = seen.insert(seen.end(), {&list, &traced(list, spans_of(list), true, offloads), offloads});
      out.push_back({it->second, layer, 1});
      ++i;
      continue;
    }
    const std::int64_t n = block ? 1 : std::min(setting.num_layers, chunk.layers - i);
    std::vector<const OpList*> members;
    for (std::int64_t k = 0; k < n; ++k) members.push_back(&layer_list(layer + k));
    const OpList* list = members[0];
    if (n > 1) {
      auto it = groups_.find(members);
      if (it == groups_.end()) it = groups_.emplace(members, model::concat(members)).first;
      list = &it->second;
    }
    out.push_back({&traced(*list, model::full_spans(*list, run_.stack), true), layer, n});
    i += n;
  }
  if (chunk.is_last) out.push_back({&traced(head_, spans_of(head_), true)});
  return out;
}

std::vector<const OpList*> Workload::lists(const model::Chunk& chunk) {
  std::vector<const OpList*> out;
  auto add = [&](const OpList& list) {
    if (std::find(out.begin(), out.end(), &list) == out.end()) out.push_back(&list);
  };
  if (chunk.is_first) add(embedding_);
  for (std::int64_t i = 0; i < chunk.layers; ++i) add(layer_list(chunk.first + i));
  if (chunk.is_last) add(head_);
  return out;
}

std::vector<const OpList*> Workload::layer_lists(const model::Chunk& chunk) {
  std::vector<const OpList*> out;
  for (std::int64_t i = 0; i < chunk.layers; ++i) out.push_back(&layer_list(chunk.first + i));
  return out;
}

std::int64_t Workload::layers_with(const std::string& module) const {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < model_.layers(); ++i) {
    const auto key = std::pair(model_.mixers[static_cast<size_t>(i)], model_.mlps[static_cast<size_t>(i)]);
    count += model::acts_on(module, layers_.at(key), run_.stack);
  }
  return count;
}

bool Workload::lies_inside(const std::string& inner, const std::string& outer) const {
  bool acts = false;
  for (const auto& [key, list] : layers_) {
    const std::vector<model::Span> spans = model::spans_for(list, {inner, outer}, {}, run_.stack);
    for (const model::Span& s : spans) {
      if (s.name != inner) continue;
      acts = true;
      if (std::none_of(spans.begin(), spans.end(), [&](const model::Span& o) {
            return o.name == outer && o.kind == model::SpanKind::WholeBlock && o.first <= s.first && s.last <= o.last;
          }))
        return false;
    }
  }
  return acts;
}

void Workload::require_known_ops(const Setting& setting) const {
  std::vector<std::string> names;
  for (const auto& [key, list] : layers_)
    for (const model::Op& op : list.ops)
      if (std::find(names.begin(), names.end(), op.name) == names.end()) names.push_back(op.name);
  for (const config::UserSpan& s : setting.user_spans) {
    for (const std::string& op : {s.first, s.last})
      if (std::find(names.begin(), names.end(), op) == names.end())
        throw Error(ErrorCode::Usage, fmt::format("--span {}: no layer of '{}' has an op '{}'{}", s.name, model_.name, op,
                                                  did_you_mean(op, names)),
                    "`gdnplan layer` lists the ops of a layer");
    const bool together = std::any_of(layers_.begin(), layers_.end(), [&](const auto& entry) {
      return entry.second.find_op(s.first) >= 0 && entry.second.find_op(s.last) >= 0;
    });
    if (!together)
      throw Error(ErrorCode::Usage, fmt::format("--span {}: no layer has both '{}' and '{}'", s.name, s.first, s.last));
  }
}

} // namespace gdn::plan
