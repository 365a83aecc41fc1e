#pragma once
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
  model::OpList list;
  std::vector<model::Span> spans;
  program::UnitTrace trace;
  program::Levels levels;
};

inline Traced traced(model::OpList list, const std::vector<std::string>& modules, bool module_alone) {
  Traced t{std::move(list), {}, {}, {}};
  t.spans = model::spans_for(t.list, modules, {}, "megatron");
  program::TraceOptions options;
  options.external_output_gradient = module_alone;
  t.trace = program::trace(t.list, t.spans, model::upstream_provider(), options);
  t.trace.list = nullptr; // the list moves with the result
  t.levels = program::levels(t.trace);
  return t;
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

inline double mib(Bytes b) { return static_cast<double>(b) / static_cast<double>(kMiB); }

} // namespace gdn::test
