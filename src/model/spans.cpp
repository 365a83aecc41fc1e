#include "model/spans.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::model {

const std::vector<SpanSpec>& megatron_spans() {
  constexpr SpanKind kWhole = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  // module, first op, last op, kind, hook (of the discard form). Op names are those of
  // src/model/megatron; of several entries for one place the first that a list has wins.
  static const std::vector<SpanSpec> specs{
      {"core_attn", "cp_a2a_q", "cp_a2a_out", kWhole, ""},
      {"core_attn", "core_attention", "core_attention", kWhole, ""},
      {"moe_act", "expert_act", "expert_act", kDiscard, "expert_fc2"},
      {"layernorm", "input_layernorm", "input_layernorm", kDiscard, "out_proj"},
      {"layernorm", "input_layernorm", "input_layernorm", kDiscard, "linear_proj"},
      {"layernorm", "pre_mlp_layernorm", "pre_mlp_layernorm", kDiscard, "moe_out"},
      {"layernorm", "pre_mlp_layernorm", "pre_mlp_layernorm", kDiscard, "unpermute"},
      {"layernorm", "pre_mlp_layernorm", "pre_mlp_layernorm", kDiscard, "mlp_fc2"},
      {"mlp", "mlp.layer_norm", "mlp_fc2", kWhole, ""},
      {"mlp", "mlp_fc1", "mlp_fc2", kWhole, ""},
      {"moe", "shared_fc1", "moe_out", kWhole, ""},
      {"moe", "router", "unpermute", kWhole, ""},
      {"shared_experts", "shared_fc1", "shared_gate", kWhole, ""},
      {"shared_experts", "shared_fc1", "shared_fc2", kWhole, ""},
      {"gdn_norm_out", "gated_norm", "hp2cp", kDiscard, "out_proj"},
      {"gdn_norm_out", "gated_norm", "hp2cp.transpose", kDiscard, "out_proj"},
      {"gdn_qkv", "in_proj.layer_norm", "gates", kWhole, "out_proj"},
      {"gdn_qkv", "in_proj", "gates", kWhole, "out_proj"},
      {"gdn_in_proj_conv", "in_proj.layer_norm", "conv1d", kWhole, ""},
      {"gdn_in_proj_conv", "in_proj", "conv1d", kWhole, ""},
      {"gdn", "in_proj.layer_norm", "out_proj", kWhole, ""},
      {"gdn", "in_proj", "out_proj", kWhole, ""}};
  return specs;
}

const std::vector<SpanSpec>& native_spans() {
  constexpr SpanKind kWhole = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  constexpr bool kDefault = true;
  // Op names are those of src/model/native. Hooks are the last op that reads the outputs, forwards or in
  // its replay, so that nothing lives longer than it must.
  static const std::vector<SpanSpec> specs{
      // Cheap rebuilds: no GEMM, no rule, no attention and no exchange between ranks is run again.
      {"input_norm", "input_norm", "input_norm", kDiscard, "in_proj", kDefault},
      {"input_norm", "input_norm", "input_norm", kDiscard, "linear_qkv", kDefault},
      {"gdn_pre", "gdn_pre", "gdn_pre", kDiscard, "rule", kDefault},
      {"gdn_pre", "gdn2_pre", "gdn2_pre", kDiscard, "rule", kDefault},
      {"gated_norm", "gated_norm", "gated_norm", kDiscard, "out_proj", kDefault, "hp2cp"}, // its exchanged copy is kept
      {"attention_pre", "attention_pre", "attention_pre", kDiscard, "core_attention", kDefault},
      {"output_gate", "output_gate", "output_gate", kDiscard, "linear_proj", kDefault},
      {"mlp_norm", "mlp_norm", "mlp_norm", kDiscard, "unpermute", kDefault}, // where module moe_fc1 reads it
      {"mlp_norm", "mlp_norm", "mlp_norm", kDiscard, "mlp_fc1", kDefault},
      {"shared_act", "shared_act", "shared_act", kDiscard, "shared_fc2", kDefault},
      {"expert_rows", "gather", "gather", kDiscard, "expert_fc1", kDefault, "dispatch"}, // the rows received are kept
      {"expert_act", "expert_act", "expert_act", kDiscard, "expert_fc2", kDefault},
      {"mlp_act", "mlp_act", "mlp_act", kDiscard, "mlp_fc2", kDefault},
      {"mtp_norms", "enorm", "eh_concat", kDiscard, "eh_proj", kDefault},
      // For the user. A projection made again from the layer's input: one GEMM replayed.
      {"gdn_proj", "input_norm", "cp2hp", kDiscard, "out_proj"}, // and its exchange
      {"gdn_proj", "input_norm", "in_proj", kDiscard, "out_proj"},
      {"gdn_norm_out", "gated_norm", "hp2cp", kDiscard, "out_proj"}, // with context parallelism: its exchange
      // The rule made again from q, k and v, which are rebuilt for its backward anyway: the least replay for what it frees.
      // With context parallelism its exchange too. Inside it gdn_pre's outputs live until out_proj has run.
      {"gdn_rule", "rule", "out_proj", kWhole, ""},
      {"attention_proj", "input_norm", "linear_qkv.copy", kDiscard, "linear_proj"},
      {"attention_proj", "input_norm", "linear_qkv", kDiscard, "linear_proj"},
      // Before d:e_out is made, which is as large as the rows it gathers. With an exchange: that too.
      {"moe_fc1", "gather", "expert_fc1", kDiscard, "unpermute"},
      {"shared_fc1", "shared_fc1", "shared_fc1", kDiscard, "shared_fc2"},
      {"router", "router", "router", kDiscard, ""},
      {"mlp_fc1", "mlp_norm", "mlp_fc1", kDiscard, "mlp_fc2"},
      // Whole halves of a layer: only the residual stream is kept.
      {"gdn", "input_norm", "out_proj", kWhole, ""},
      {"attention", "input_norm", "linear_proj", kWhole, ""},
      {"moe", "mlp_norm", "moe_out", kWhole, ""},
      {"moe", "mlp_norm", "unpermute", kWhole, ""},
      {"mlp", "mlp_norm", "mlp_fc2", kWhole, ""}};
  return specs;
}

namespace {

// A user's discard span hooks on the last op that reads one of its outputs in forward.
int default_hook(const OpList& list, int first, int last) {
  int hook = -1;
  for (int i = last + 1; i < static_cast<int>(list.ops.size()); ++i)
    for (TensorId t : list.ops[static_cast<size_t>(i)].inputs)
      if (int p = list.producer(t); p >= first && p <= last) hook = i;
  return hook;
}

// A run of ops on one list; a list may hold several layers, each with a prefix before its op names.
struct FoundSpan {
  std::string prefix;
  int first, last;
};
std::vector<FoundSpan> places(const OpList& list, const std::string& first, const std::string& last) {
  std::vector<FoundSpan> found;
  for (size_t i = 0; i < list.ops.size(); ++i) {
    const std::string& name = list.ops[i].name;
    if (!name.ends_with(first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (!prefix.empty() && !prefix.ends_with('.')) continue;
    if (int end = list.find_op(prefix + last); end >= 0) found.push_back({prefix, static_cast<int>(i), end});
  }
  return found;
}

// "NAME:discard" is NAME's spans in the discard form.
void add(std::vector<Span>& spans, const OpList& list, const SpanSpec& spec, bool discard, bool holds, ReplayExtent extent) {
  const std::string name = discard ? spec.module + ":discard" : spec.module;
  for (const FoundSpan& p : places(list, spec.first, spec.last)) {
    if (!spec.unless.empty() && list.find_op(p.prefix + spec.unless) >= 0) continue;
    const bool taken = std::any_of(spans.begin(), spans.end(), [&](const Span& s) {
      return s.name == name && s.first <= p.last && p.first <= s.last;
    });
    if (taken) continue;
    Span s{name, p.first, p.last, discard ? SpanKind::DiscardOutput : spec.kind, -1, extent, holds};
    if (s.kind == SpanKind::DiscardOutput) {
      s.hook = spec.hook.empty() ? default_hook(list, s.first, s.last) : list.find_op(p.prefix + spec.hook);
      // The hook is on what the module returns: with an adapter, the sum of both.
      if (const int sum = list.find_op(p.prefix + spec.hook + ".lora_add"); s.hook >= 0 && sum >= 0) s.hook = sum;
      if (s.hook < 0) continue; // another layer kind's entry
    }
    spans.push_back(s);
  }
}

} // namespace

std::vector<std::string> native_modules() {
  std::vector<std::string> names;
  for (const SpanSpec& s : native_spans()) {
    std::string name = (s.by_default ? "-" : "") + s.module;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  std::stable_partition(names.begin(), names.end(), [](const std::string& name) { return name[0] != '-'; });
  return names;
}

bool is_native_module(const std::string& module) {
  const std::vector<std::string> known = native_modules();
  return std::find(known.begin(), known.end(), module) != known.end();
}

bool acts_on(const std::string& name, const OpList& list, const std::string& stack) {
  const auto& specs = stack == "native" ? native_spans() : megatron_spans();
  return std::any_of(specs.begin(), specs.end(), [&](const SpanSpec& s) {
    return (s.module == name || s.module + ":discard" == name) && !places(list, s.first, s.last).empty();
  });
}

std::vector<Span> spans_for(const OpList& list, const std::vector<std::string>& modules,
                            const std::vector<config::UserSpan>& user, const std::string& stack) {
  const bool native = stack == "native";
  const ReplayExtent extent = native ? ReplayExtent::Needed : ReplayExtent::All;
  if (native)
    for (const std::string& name : modules)
      if (!is_native_module(name))
        throw Error(ErrorCode::Usage, fmt::format("stack native has no module '{}'{}", name, did_you_mean(name, native_modules())),
                    fmt::format("one of {}", fmt::join(native_modules(), ", ")));
  std::vector<Span> spans;
  auto listed = [&](const std::string& name) { return std::find(modules.begin(), modules.end(), name) != modules.end(); };
  for (const SpanSpec& spec : native ? native_spans() : megatron_spans()) {
    if (spec.by_default ? !listed("-" + spec.module) : listed(spec.module)) add(spans, list, spec, false, !native, extent);
    if (!native && listed(spec.module + ":discard")) add(spans, list, spec, true, !native, extent);
  }
  for (const config::UserSpan& u : user)
    for (const FoundSpan& p : places(list, u.first, u.last)) { // none: another layer kind's
      if (p.last < p.first)
        throw Error(ErrorCode::Usage, fmt::format("--span {}: '{}' comes after '{}' in '{}'", u.name, u.first, u.last, list.name));
      Span s{u.name, p.first, p.last, u.discard ? SpanKind::DiscardOutput : SpanKind::WholeBlock, -1, extent, !native};
      if (u.discard) s.hook = default_hook(list, p.first, p.last);
      spans.push_back(s);
    }
  return spans;
}

std::vector<Span> full_spans(const OpList& list, const std::string& stack) {
  const bool native = stack == "native";
  std::vector<Span> spans = native ? spans_for(list, {}, {}, stack) : std::vector<Span>{};
  spans.push_back({"full", 0, static_cast<int>(list.ops.size()) - 1, SpanKind::WholeBlock, -1,
                   native ? ReplayExtent::Needed : ReplayExtent::All, !native});
  return spans;
}

} // namespace gdn::model
