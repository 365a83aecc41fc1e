#include "model/parameters.h"

#include <algorithm>
#include <numeric>

#include <fmt/core.h>

#include "core/error.h"
#include "model/parameter_layers.h"
#include "model/stages.h"

namespace gdn::model {

std::int64_t Parameter::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, checked_mul);
}

const Section& Parameter::section(std::string_view section_name) const {
  for (const Section& s : sections)
    if (s.name == section_name) return s;
  throw Error(ErrorCode::Internal,
              fmt::format("parameter '{}' has no section '{}'", name, section_name));
}

const Parameter* ParameterTable::find(std::string_view name) const {
  auto it = std::find_if(parameters.begin(), parameters.end(),
                         [&](const Parameter& p) { return p.name == name; });
  return it == parameters.end() ? nullptr : &*it;
}

const Parameter& ParameterTable::at(std::string_view name) const {
  if (const Parameter* p = find(name)) return *p;
  std::vector<std::string> names;
  for (const Parameter& p : parameters) names.push_back(p.name);
  throw Error(ErrorCode::Config,
              fmt::format("unknown parameter '{}'{}", name, did_you_mean(name, names)));
}

std::int64_t padded_vocabulary(const config::Model& model, const config::Run& run) {
  const std::int64_t divisor = run.vocab_divisor.value_or(128);
  return divisor == 0 ? model.vocab : round_up(model.vocab, checked_mul(divisor, run.parallel.tp));
}

// ------------------------------------------------------------------------------- the table ----

namespace {

struct Parts {
  std::int64_t vocab;
  bool vision, mtp;
};

ParameterTable build_table(const config::Model& m, Parts parts) {
  ParameterTable table;
  std::vector<Parameter>& out = table.parameters;
  const Init norm = m.zero_centred_norm ? Init::Zero : Init::One;

  if (m.vision && parts.vision) {
    ParameterList list(out, "vision.", Part::Vision, Place::First, -1);
    add_vision(list, *m.vision);
  }
  ParameterList first(out, "", Part::Text, Place::First, -1);
  first.add("embedding.word", {parts.vocab, m.hidden}, ShardRule::Vocab);

  for (std::int64_t i = 0; i < m.layers(); ++i) {
    ParameterList list(out, fmt::format("layers.{}.", i), Part::Text, Place::Layer, i);
    add_layer(list, m, m.mixers[static_cast<size_t>(i)], m.mlps[static_cast<size_t>(i)]);
  }

  ParameterList last(out, "", Part::Text, Place::Last, -1);
  last.add("final_norm", {m.hidden}, ShardRule::Replicated, 0, norm);
  if (!m.tied_embeddings) last.add("head", {parts.vocab, m.hidden}, ShardRule::Vocab);

  // Each depth: two entry norms, their concatenation projected back to h, a layer built from the
  // last decoder layer's kind, and a norm of its own. Embedding and head are the model's.
  for (std::int64_t i = 0; parts.mtp && i < m.mtp_layers; ++i) {
    const std::string prefix = fmt::format("mtp.{}.", i);
    ParameterList list(out, prefix, Part::Mtp, Place::Last, i);
    list.add("enorm", {m.hidden}, ShardRule::Replicated, 0, norm);
    list.add("hnorm", {m.hidden}, ShardRule::Replicated, 0, norm);
    list.add("eh_proj", {m.hidden, 2 * m.hidden}, ShardRule::Column);
    ParameterList layer(out, prefix + "layer.", Part::Mtp, Place::Last, i);
    add_layer(layer, m, m.mixers.back(), m.mlps.back());
    list.add("final_norm", {m.hidden}, ShardRule::Replicated, 0, norm);
  }
  return table;
}

} // namespace

namespace {

// LoRA name of a linear, by its parameter; empty: no adapter.
std::string_view lora_target(std::string_view local) {
  static const std::vector<std::pair<std::string_view, std::string_view>> targets{
      {"attention.linear_qkv", "linear_qkv"}, {"attention.linear_proj", "linear_proj"}, {"mlp.fc1", "linear_fc1"},
      {"mlp.fc2", "linear_fc2"}, {"moe.shared.fc1", "linear_fc1"}, {"moe.shared.fc2", "linear_fc2"},
      {"gdn.in_proj", "in_proj"}, {"gdn.out_proj", "out_proj"}};
  for (const auto& [parameter, target] : targets)
    if (parameter == local) return target;
  return {};
}

// Everything is frozen; A [r, in] and B [out, r] follow each linear that is a target.
void add_adapters(ParameterTable& table, const config::Lora& lora) {
  std::vector<Parameter> all;
  for (Parameter& p : table.parameters) {
    p.trainable = false;
    all.push_back(p);
    if (!lora.on(lora_target(p.local))) continue;
    const bool column = p.rule() == ShardRule::Column;
    Parameter a = p, b = p;
    a.trainable = b.trainable = true;
    a.name += ".lora_a", a.local += ".lora_a", b.name += ".lora_b", b.local += ".lora_b";
    a.init = Init::Normal, b.init = Init::Zero;
    a.shape = {lora.rank, p.shape[1]}, b.shape = {p.shape[0], lora.rank};
    a.dim = column ? 0 : 1, a.repeats = 0;
    a.sections = {{"all", a.shape[static_cast<size_t>(a.dim)], column ? ShardRule::Column : ShardRule::Row}};
    if (!column) b.dim = 0, b.repeats = 0, b.sections = {{"all", b.shape[0], ShardRule::Replicated}};
    all.push_back(std::move(a));
    all.push_back(std::move(b));
  }
  table.parameters = std::move(all);
}

} // namespace

ParameterTable parameter_table(const config::Model& model) {
  return build_table(model, {.vocab = model.vocab, .vision = true, .mtp = true});
}

ParameterTable parameter_table(const config::Model& model, const config::Run& run) {
  ParameterTable table = build_table(model, {.vocab = padded_vocabulary(model, run),
                                             .vision = run.vision != config::VisionMode::Absent,
                                             .mtp = run.train_mtp});
  if (run.vision == config::VisionMode::Frozen)
    for (Parameter& p : table.parameters)
      if (p.part == Part::Vision) p.trainable = false;
  if (run.lora.rank > 0) add_adapters(table, run.lora);
  return table;
}

ParameterTotals totals(const ParameterTable& table) {
  ParameterTotals t;
  for (const Parameter& p : table.parameters) {
    const std::int64_t n = p.elements();
    const bool routed = p.group == ParameterGroup::RoutedExpert;
    switch (p.part) {
    case Part::Text:
      t.text += n;
      if (routed) t.routed_text += n;
      break;
    case Part::Vision: t.vision += n; break;
    case Part::Mtp:
      t.mtp += n;
      if (routed) t.routed_mtp += n;
      break;
    }
  }
  return t;
}

ActiveParameters active_parameters(const config::Model& model) {
  const ParameterTotals t = totals(parameter_table(model));
  const std::int64_t used =
      t.routed_text == 0 ? 0
                         : t.routed_text / model.moe.experts * model.moe.top_k; // exact: per expert
  const std::int64_t matrix = model.vocab * model.hidden;
  const std::int64_t both = t.text - t.routed_text + used;
  // A tied matrix is one: without the input embedding it still serves as the head.
  return {both, model.tied_embeddings ? both : both - matrix,
          both - matrix * (model.tied_embeddings ? 1 : 2)};
}

// -------------------------------------------------------------------------------- sharding ----

namespace {

std::int64_t divisor_of(ShardRule rule, const config::Parallel& parallel) {
  switch (rule) {
  case ShardRule::Replicated: return 1;
  case ShardRule::Column:
  case ShardRule::Row:
  case ShardRule::Vocab: return parallel.tp;
  case ShardRule::ExpertColumn:
  case ShardRule::ExpertRow: return parallel.etp;
  }
  return 1;
}

bool is_expert(const Parameter& p) { return p.group == ParameterGroup::RoutedExpert; }

void require_divides(const Parameter& p, const std::string& what, std::int64_t size,
                     const char* key, std::int64_t divisor) {
  if (size % divisor != 0)
    throw Error(ErrorCode::Config, fmt::format("parameter '{}': {} = {} does not divide by {} = {}",
                                               p.name, what, size, key, divisor));
}

} // namespace

std::vector<std::int64_t> local_shape(const Parameter& p, const config::Parallel& parallel) {
  std::vector<std::int64_t> shape = p.shape;
  const std::int64_t divisor = divisor_of(p.rule(), parallel);
  const char* key = is_expert(p) ? "etp" : "tp";
  if (p.repeats > 0)
    require_divides(p, "rows", shape[static_cast<size_t>(p.dim)], key, divisor);
  else
    for (const Section& s : p.sections)
      require_divides(p, "section " + s.name, s.size, key, divisor);
  shape[static_cast<size_t>(p.dim)] /= divisor;
  if (is_expert(p)) {
    require_divides(p, "experts", shape[0], "ep", parallel.ep);
    shape[0] /= parallel.ep;
  }
  return shape;
}

std::int64_t local_elements(const Parameter& p, const config::Parallel& parallel) {
  const std::vector<std::int64_t> shape = local_shape(p, parallel);
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, checked_mul);
}

std::vector<RowRange> shard_rows(const Parameter& p, const config::Parallel& parallel,
                                 std::int64_t shard) {
  const std::int64_t divisor = divisor_of(p.rule(), parallel);
  const std::int64_t local =
      local_shape(p, parallel)[static_cast<size_t>(p.dim)]; // checks that it divides
  if (p.rule() == ShardRule::Replicated || p.repeats > 0)
    return {{p.rule() == ShardRule::Replicated ? 0 : shard * local, local}};
  std::vector<RowRange> rows;
  std::int64_t start = 0;
  for (const Section& s : p.sections) {
    const std::int64_t n = s.size / divisor;
    rows.push_back({start + shard * n, n});
    start += s.size;
  }
  return rows;
}

HeadsPerRank attention_heads_per_rank(const config::AttentionShape& a, std::int64_t tp) {
  const std::int64_t query = a.heads / tp;
  return {query, a.output_gate ? query : 0, std::max<std::int64_t>(1, a.kv_heads / tp),
          std::max<std::int64_t>(1, tp / a.kv_heads)};
}

std::vector<LocalParameter> local_parameters(const ParameterTable& table,
                                             const config::Model& model, const config::Run& run,
                                             std::int64_t pipeline_rank) {
  const config::Parallel& parallel = run.parallel;
  std::vector<LocalParameter> local;
  auto add = [&](const Parameter& p, const Chunk& c, bool copy) {
    const std::int64_t tensors = is_expert(p) ? p.shape[0] / parallel.ep : 1;
    local.push_back({&p, local_elements(p, parallel), tensors, c.virtual_stage, copy});
  };
  for (const Chunk& c : chunks_of_rank(model.layers(), parallel, pipeline_rank)) {
    for (const Parameter& p : table.parameters) {
      const bool here = p.place == Place::First ? c.is_first
                        : p.place == Place::Last
                            ? c.is_last
                            : p.layer >= c.first && p.layer < c.first + c.layers;
      if (here) add(p, c, false);
    }
    if (!c.is_last || parallel.pp == 1) continue;
    const bool mtp = run.train_mtp && model.mtp_layers > 0;
    int copies = (mtp ? 1 : 0) + (model.tied_embeddings ? 1 : 0);
    if (run.stack != "megatron") copies = std::min(copies, 1); // one copy serves both
    for (int i = 0; i < copies; ++i) add(table.at("embedding.word"), c, true);
  }
  return local;
}

RankElements rank_elements(const ParameterTable& table, const config::Model& model,
                           const config::Run& run, std::int64_t pipeline_rank) {
  RankElements n;
  for (const LocalParameter& p : local_parameters(table, model, run, pipeline_rank))
    (is_expert(*p.parameter) ? n.expert : n.dense) += p.elements;
  return n;
}

DType stored_dtype(const Parameter& p, const config::Run& run) {
  switch (p.dtype) {
  case DTypeGroup::Weight: return run.dtype;
  case DTypeGroup::Gate: return run.stack == "native" ? DType::FP32 : run.dtype;
  case DTypeGroup::Buffer: return DType::FP32;
  }
  return run.dtype;
}

} // namespace gdn::model
