#include "model/spans.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::model {

const std::vector<SpanSpec>& megatron_spans() {
  constexpr SpanKind kWhole = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  // module, first op, last op, kind, hook. Op names are those of src/model/megatron.
  static const std::vector<SpanSpec> specs{
      {"core_attn", "core_attention", "core_attention", kWhole, ""},
      {"moe_act", "expert_act", "expert_act", kDiscard, "expert_fc2"},
      {"layernorm", "input_layernorm", "input_layernorm", kDiscard, "out_proj"},
      {"layernorm", "input_layernorm", "input_layernorm", kDiscard, "linear_proj"},
      {"layernorm", "pre_mlp_layernorm", "pre_mlp_layernorm", kDiscard, "moe_out"},
      {"layernorm", "pre_mlp_layernorm", "pre_mlp_layernorm", kDiscard, "mlp_fc2"},
      {"mlp", "mlp.layer_norm", "mlp_fc2", kWhole, ""},
      {"mlp", "mlp_fc1", "mlp_fc2", kWhole, ""},
      {"moe", "router", "moe_out", kWhole, ""},
      {"shared_experts", "shared_fc1", "shared_gate", kWhole, ""},
      {"gdn_norm_out", "gated_norm", "hp2cp", kDiscard, "out_proj"},
      {"gdn_norm_out", "gated_norm", "hp2cp.transpose", kDiscard, "out_proj"},
      {"gdn_qkv", "in_proj.layer_norm", "gates", kWhole, ""},
      {"gdn_qkv", "in_proj", "gates", kWhole, ""},
      {"gdn_qkv:discard", "in_proj.layer_norm", "gates", kDiscard, "out_proj"},
      {"gdn_qkv:discard", "in_proj", "gates", kDiscard, "out_proj"},
      {"gdn_in_proj_conv", "in_proj.layer_norm", "conv1d", kWhole, ""},
      {"gdn_in_proj_conv", "in_proj", "conv1d", kWhole, ""},
      {"gdn", "in_proj.layer_norm", "out_proj", kWhole, ""},
      {"gdn", "in_proj", "out_proj", kWhole, ""}};
  return specs;
}

const std::vector<SpanSpec>& native_spans() {
  constexpr SpanKind kWhole = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  static const std::vector<SpanSpec> specs{
      {"input_norm", "input_norm", "input_norm", kDiscard, "in_proj", true},
      {"input_norm", "input_norm", "input_norm", kDiscard, "linear_qkv", true},
      {"gdn_pre", "gdn_pre", "gdn_pre", kDiscard, "rule", true},
      {"gated_norm", "gated_norm", "gated_norm", kDiscard, "out_proj", true},
      {"gdn", "input_norm", "out_proj", kWhole, ""}};
  return specs;
}

namespace {

// The first entry of each place wins: "mlp" with its fused norm before "mlp" without.
void add(std::vector<Span>& spans, const OpList& list, const SpanSpec& spec, bool holds, ReplayExtent extent) {
  const int first = list.find_op(spec.first), last = list.find_op(spec.last);
  if (first < 0 || last < 0 || (!spec.hook.empty() && list.find_op(spec.hook) < 0)) return;
  for (const Span& s : spans)
    if (s.name == spec.module && s.first <= last && first <= s.last) return;
  Span s{spec.module, first, last, spec.kind, -1, extent, holds};
  if (spec.kind == SpanKind::DiscardOutput) s.hook = list.find_op(spec.hook);
  spans.push_back(s);
}

// A user's discard span hooks on the last op that reads one of its outputs in forward.
int default_hook(const OpList& list, int first, int last) {
  int hook = -1;
  for (int i = last + 1; i < static_cast<int>(list.ops.size()); ++i)
    for (TensorId t : list.ops[static_cast<size_t>(i)].inputs)
      if (int p = list.producer(t); p >= first && p <= last) hook = i;
  return hook;
}

} // namespace

bool acts_on(const std::string& name, const OpList& list, const std::string& stack) {
  const auto& specs = stack == "native" ? native_spans() : megatron_spans();
  return std::any_of(specs.begin(), specs.end(), [&](const SpanSpec& s) {
    return s.module == name && list.find_op(s.first) >= 0 && list.find_op(s.last) >= 0;
  });
}

std::vector<Span> spans_for(const OpList& list, const std::vector<std::string>& modules,
                            const std::vector<config::UserSpan>& user, const std::string& stack) {
  const bool native = stack == "native";
  const ReplayExtent extent = native ? ReplayExtent::Needed : ReplayExtent::All;
  std::vector<Span> spans;
  auto listed = [&](const std::string& name) { return std::find(modules.begin(), modules.end(), name) != modules.end(); };
  for (const SpanSpec& spec : native ? native_spans() : megatron_spans())
    if (spec.by_default ? !listed("-" + spec.module) : listed(spec.module)) add(spans, list, spec, !native, extent);
  for (const config::UserSpan& u : user) {
    const int first = list.find_op(u.first), last = list.find_op(u.last);
    if (first < 0 || last < 0) continue; // another layer kind's
    if (last < first)
      throw Error(ErrorCode::Usage, fmt::format("--span {}: '{}' comes after '{}' in '{}'", u.name, u.first, u.last, list.name));
    Span s{u.name, first, last, u.discard ? SpanKind::DiscardOutput : SpanKind::WholeBlock, -1, extent, !native};
    if (u.discard) s.hook = default_hook(list, first, last);
    spans.push_back(s);
  }
  return spans;
}

} // namespace gdn::model
