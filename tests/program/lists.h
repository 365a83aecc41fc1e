#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/megatron/ends.h"
#include "model/megatron/layer.h"
#include "model/spans.h"
#include "program/summary.h"

// Shapes and short cuts shared by the tests of the op lists.
namespace gdn::test {

// The shape of the measured module: h 2048, Hk 16, Hv 32, dk = dv = 128, K 4; attention and experts
// of Qwen3-Next-80B-A3B.
inline config::Model reference_model() {
  config::Model m;
  m.name = "reference";
  m.hidden = 2048;
  m.vocab = 151936;
  m.mixers = {config::LayerKind::Gdn, config::LayerKind::Attention};
  m.mlps = {config::MlpKind::Moe, config::MlpKind::Moe};
  m.moe.experts = 512;
  m.moe.top_k = 10;
  m.moe.ffn = m.moe.shared_ffn = 512;
  m.ffn = 5120;
  return m;
}

inline config::Run one_gpu(config::Build build, const std::string& revision = "main", std::int64_t seq = 8192) {
  config::Run run;
  run.seq = seq;
  run.build = build;
  run.revision = Revision::parse(revision);
  return run;
}

struct Traced {
  std::unique_ptr<model::OpList> owned; // the trace points to it
  const model::OpList& list;
  std::vector<model::Span> spans;
  program::UnitTrace trace;
  program::Levels levels;
};

inline Traced traced(model::OpList unit, std::vector<model::Span> spans, bool module_alone) {
  auto owned = std::make_unique<model::OpList>(std::move(unit));
  const model::OpList& list = *owned;
  program::TraceOptions options;
  options.external_output_gradient = module_alone;
  program::UnitTrace trace = program::trace(list, spans, model::upstream_provider(), options);
  program::Levels levels = program::levels(trace);
  return {std::move(owned), list, std::move(spans), std::move(trace), std::move(levels)};
}

inline Traced traced(model::OpList unit, const std::vector<std::string>& modules, bool module_alone) {
  std::vector<model::Span> spans = model::spans_for(unit, modules, {}, "megatron");
  return traced(std::move(unit), std::move(spans), module_alone);
}

inline Traced module_alone(const config::Model& model, const config::Run& run, const std::string& module,
                           const std::vector<std::string>& modules = {}) {
  return traced(model::megatron::module_list(model, run, module), modules, true);
}

inline Traced whole_layer(const config::Model& model, const config::Run& run, config::LayerKind mixer, config::MlpKind mlp,
                          const std::vector<std::string>& modules = {}) {
  return traced(model::megatron::decoder_layer(model, run, mixer, mlp), modules, false);
}

// Bytes that cross from forward to backward, a token of this rank; the unit's input included.
inline double retained_per_token(const Traced& t) {
  return static_cast<double>(t.levels.retained) / static_cast<double>(t.list.tokens);
}

// Bytes a token of one tensor's storage.
inline double bytes_of(const Traced& t, const std::string& tensor) {
  return static_cast<double>(t.list.storage_of(t.list.find_tensor(tensor)).bytes) / static_cast<double>(t.list.tokens);
}

inline const model::Op& op_of(const Traced& t, const std::string& name) {
  return t.list.ops.at(static_cast<size_t>(t.list.find_op(name)));
}

inline double mib(Bytes b) { return static_cast<double>(b) / static_cast<double>(kMiB); }

} // namespace gdn::test
