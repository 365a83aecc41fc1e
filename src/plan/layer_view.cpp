#include "plan/layer_view.h"

#include <algorithm>
#include <charconv>

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/describe/own.h"
#include "model/spans.h"
#include "model/stack_lists.h"

namespace gdn::plan {

using program::Buffer;
using program::Pass;

namespace {

bool has(const config::Model& model, const std::string& which) {
  auto mixer = [&](config::LayerKind k) { return std::find(model.mixers.begin(), model.mixers.end(), k) != model.mixers.end(); };
  auto mlp = [&](config::MlpKind k) { return std::find(model.mlps.begin(), model.mlps.end(), k) != model.mlps.end(); };
  if (which == "gdn") return mixer(config::LayerKind::Gdn);
  if (which == "gdn2") return mixer(config::LayerKind::Gdn2);
  if (which == "attention") return mixer(config::LayerKind::Attention);
  if (which == "moe") return mlp(config::MlpKind::Moe);
  if (which == "mlp") return mlp(config::MlpKind::Dense);
  return false;
}

model::OpList list_of(const config::Model& model, const config::Run& run, const std::string& which) {
  std::int64_t index = -1;
  auto [end, ec] = std::from_chars(which.data(), which.data() + which.size(), index);
  if (ec == std::errc{} && end == which.data() + which.size()) {
    if (index < 0 || index >= model.layers())
      throw Error(ErrorCode::Usage, fmt::format("--layer {}: model '{}' has layers 0 to {}", which, model.name, model.layers() - 1));
    return model::decoder_layer(model, run, model.mixers[static_cast<size_t>(index)], model.mlps[static_cast<size_t>(index)]);
  }
  const std::vector<std::string> modules{"gdn", "gdn2", "attention", "moe", "mlp"};
  if (std::find(modules.begin(), modules.end(), which) == modules.end())
    throw Error(ErrorCode::Usage, fmt::format("--layer: no layer '{}'{}", which, did_you_mean(which, modules)),
                "gdn, gdn2, attention, moe, mlp, or the index of a decoder layer");
  if (!has(model, which))
    throw Error(ErrorCode::Usage, fmt::format("--layer {}: model '{}' has no such layer", which, model.name));
  return model::module_list(model, run, which);
}

// The span whose replay makes a tensor again: the innermost one with the op that made it.
std::string replaying_span(const std::vector<model::Span>& spans, int op) {
  const model::Span* best = nullptr;
  for (const model::Span& s : spans)
    if (op >= s.first && op <= s.last && (!best || s.last - s.first < best->last - best->first)) best = &s;
  return best ? best->name : "";
}

} // namespace

LayerView view_layer(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
                     const std::string& which, const Setting& setting) {
  const model::OpList list = list_of(model, run, which);
  const std::vector<model::Span> spans = setting.granularity == config::Granularity::Full
                                             ? model::full_spans(list, run.stack)
                                             : model::spans_for(list, setting.modules, setting.user_spans, run.stack);
  program::TraceOptions options;
  options.external_output_gradient = true;
  const model::Provider& provider = kernels::provider_of(run.stack);
  const program::UnitTrace t = program::trace(list, spans, provider, options);
  const program::Levels levels = program::levels(t);

  // A whole decoder layer owns its input; as a view of one layer alone it belongs to the caller.
  const Buffer& input = t.buffers[static_cast<size_t>(t.input)];
  const Bytes counted_input = input.external ? 0 : input.bytes;
  LayerView out;
  out.name = list.name;
  out.tokens = list.tokens;
  out.retained = levels.retained;
  out.input = input.bytes;
  out.output = t.buffers[static_cast<size_t>(t.output)].bytes;
  out.forward_peak = levels.forward.bytes - counted_input;
  out.backward_peak = std::max(levels.backward.bytes, levels.replay.bytes) - counted_input;
  out.replay_peak = levels.replay.event >= 0 ? levels.replay.bytes - counted_input : 0;
  out.forward_event = t.event_name(levels.forward.event, spans);
  const program::Peak& worst = levels.replay.bytes > levels.backward.bytes ? levels.replay : levels.backward;
  out.backward_event = worst.event >= 0 ? t.event_name(worst.event, spans) : "";
  const cost::CostModel cost(hardware, std::string(provider.name()), run.parallel, run.dtype, run.overlap);
  out.time = cost.time(t, provider);
  out.assumptions.assign(cost.assumptions().begin(), cost.assumptions().end());

  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const model::Tensor& tensor = list.tensors[i];
    const model::TensorId id = static_cast<model::TensorId>(i);
    TensorView v{tensor.name, list.storage_of(id).name, "", tensor.shape, tensor.dtype, tensor.bytes(), "freed", ""};
    const int op = list.producer(id);
    v.made_by = op < 0 ? "input" : list.ops[static_cast<size_t>(op)].name;
    bool again = false, crosses = false;
    for (const Buffer& b : t.buffers) {
      if (b.gradient || list.tensor(b.tensor).storage != tensor.storage) continue;
      again = again || b.generation > 0 || b.refill >= 0;
      crosses = crosses || (b.generation == 0 && b.alloc < t.forward_end && b.last >= t.forward_end && b.drop < 0);
    }
    if (id == list.input) v.state = crosses ? "input, kept" : "input";
    else if (id == list.output) v.state = "output";
    else if (tensor.base >= 0) v.state = fmt::format("view of {}", list.tensor(tensor.base).name);
    else if (crosses) v.state = "kept";
    else if (again) v.state = "replayed", v.span = replaying_span(spans, op);
    out.tensors.push_back(std::move(v));
  }
  return out;
}

} // namespace gdn::plan
