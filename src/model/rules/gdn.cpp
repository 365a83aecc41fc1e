#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "model/rules/check.h"

// Attention variant, heads and the shape of GDN. Row numbers count the list "GDN dimensions and
// runtime" of the stack's rules.
namespace gdn::model::rules {

namespace {

std::string number(std::int64_t n) { return fmt::format("{}", n); }

std::vector<std::string> known_variants(const Revision& revision) {
  if (revision.base == "main") return {"gdn", "gdn2", "dsa", "gated_delta_net"};
  if (revision.base == "dev") return {"gated_delta_net", "dsa", "dsv4_hybrid"};
  return {"gated_delta_net", "dsa"};
}

// Whether the context-parallel exchange splits heads: everywhere but in dev's chunkwise mode.
bool splits_heads(const Check& c) {
  return !c.megatron || c.run.revision.base != "dev" || c.settings.linear_cp_mode == "headwise";
}

// Degrees that divide both head counts.
std::string legal_degrees(std::int64_t key_heads, std::int64_t value_heads) {
  std::vector<std::int64_t> legal;
  for (std::int64_t d = 1; d <= key_heads; ++d)
    if (key_heads % d == 0 && value_heads % d == 0) legal.push_back(d);
  return fmt::format("{}", fmt::join(legal, ", "));
}

// Row 6: an integer, or a list with one entry a layer.
void check_frequency(Check& c, const std::string& text) {
  const char* key = "linear_attention_freq";
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc{} && end == text.data() + text.size()) return;
  if (text.size() < 2 || text.front() != '[' || text.back() != ']')
    return c.reject("gdn.6", Exception::ValueError, key, text, "is neither an integer nor a list",
                    "an integer m (layer i is full attention when (i + 1) % m = 0), or a list of 0 and 1");
  std::int64_t entries = text.find_first_not_of(" []") == std::string::npos ? 0 : 1;
  for (char ch : text) entries += ch == ',';
  if (entries != c.model.layers())
    c.reject("gdn.6", Exception::AssertionError, key, text,
             fmt::format("has {} entries for {} layers", entries, c.model.layers()));
}

} // namespace

void check_variant_and_heads(Check& c) {
  const std::string& given = c.run.attention_variant;
  const Revision& revision = c.run.revision;
  if (c.megatron && given == "gated_delta_net" && revision.base == "main") // row 1
    c.warn("gdn.1", "experimental_attention_variant", given, "DeprecationWarning: the name is now gdn");
  const std::vector<std::string> known = known_variants(revision);
  if (c.megatron && !given.empty() && !contains(known, given))
    c.reject("gdn.variant", Exception::ValueError, "experimental_attention_variant", given,
             fmt::format("is not a variant of {}", revision.text()), fmt::format("{}", fmt::join(known, ", ")),
             nearest(given, known));
  else if (c.megatron && c.has_gdn2 && !contains(known, "gdn2"))
    c.reject("gdn.variant", Exception::ValueError, "revision", revision.text(), "has no GDN2 layers", "main");

  // Row 2.
  const config::AttentionShape& a = c.model.attention;
  const std::int64_t tp = c.run.parallel.tp;
  if (c.has_attention && a.heads % tp != 0)
    c.reject("gdn.2", Exception::ValueError, "tensor_model_parallel_size", number(tp),
             fmt::format("does not divide num_attention_heads = {}", a.heads));
  if (c.has_attention && a.kv_heads % tp != 0 && tp % a.kv_heads != 0)
    c.reject("gdn.2", Exception::ValueError, "tensor_model_parallel_size", number(tp),
             fmt::format("is neither a divisor nor a multiple of num_query_groups = {}", a.kv_heads));
}

void check_gdn_dimensions(Check& c) {
  const bool present = c.has_gdn || c.has_gdn2;
  if (!present && c.variant == "gdn") // row 3
    c.reject("gdn.3", Exception::AssertionError, "experimental_attention_variant", c.run.attention_variant,
             "needs linear_attention_freq: the model has no GDN layer");
  if (!present && c.variant == "gdn2")
    c.reject("gdn.3", Exception::ValueError, "experimental_attention_variant", c.run.attention_variant,
             "needs linear_attention_freq: the model has no GDN2 layer");
  if (c.settings.linear_attention_freq) check_frequency(c, *c.settings.linear_attention_freq);
  if (!present) return;

  // Row 4.
  const config::GdnShape& s = c.model.gdn;
  bool complete = true;
  for (auto [key, value] : {std::pair{"linear_conv_kernel_dim", s.conv_kernel},
                            {"linear_key_head_dim", s.key_head_dim},
                            {"linear_value_head_dim", s.value_head_dim},
                            {"linear_num_key_heads", s.key_heads},
                            {"linear_num_value_heads", s.value_heads}}) {
    if (value > 0) continue;
    complete = false;
    c.reject("gdn.4", Exception::AssertionError, key, number(value), "must be set");
  }
  if (!complete) return;
  if (s.value_heads % s.key_heads != 0)
    c.reject("gdn.4", Exception::AssertionError, "linear_num_value_heads", number(s.value_heads),
             fmt::format("is not a multiple of linear_num_key_heads = {}", s.key_heads));
  // Row 5: the cp factor applies where context parallelism splits heads.
  const config::Parallel& p = c.run.parallel;
  const std::int64_t degree = p.tp * (splits_heads(c) ? p.cp : 1);
  const char* key = degree == p.tp ? "tensor_model_parallel_size" : "tensor_model_parallel_size x context_parallel_size";
  for (auto [name, symbol, heads] : {std::tuple{"linear_num_key_heads", "hk", s.key_heads},
                                     {"linear_num_value_heads", "hv", s.value_heads}})
    if (heads % degree != 0)
      c.reject("gdn.4", Exception::AssertionError, key, number(degree),
               fmt::format("does not divide {} ({} = {})", name, symbol, heads),
               legal_degrees(s.key_heads, s.value_heads));

  if (c.run.l2norm == config::L2Norm::Kernel && c.megatron) {
    if (!c.run.revision.has("l2norm_kernel"))
      c.reject("plan.l2norm", Exception::Plan, "l2norm", "kernel",
               fmt::format("revision {} normalises q and k before the rule kernel", c.run.revision.text()),
               "caller", "add +l2norm_kernel to the revision");
    if (c.has_gdn2)
      c.reject("plan.l2norm", Exception::Plan, "l2norm", "kernel",
               "GDN2 keeps the normalisation with the caller whatever the revision", "caller");
  }
}

// What the constructors of the layers check (rows 7 to 13).
void check_gdn_construction(Check& c) {
  const config::StackSettings& o = c.settings;
  const config::GdnShape& s = c.model.gdn;
  const config::Parallel& p = c.run.parallel;
  if (c.megatron && c.run.build == config::Build::Local) // row 7
    c.tolerate("gdn.7", Exception::AssertionError, "build", "local",
               "the stack builds these models with Transformer Engine only",
               "local describes the single module that was measured");
  // Row 8.
  if (c.megatron && c.has_attention && c.model.attention.output_gate && o.multi_latent_attention)
    c.reject("gdn.8", Exception::NotImplementedError, "multi_latent_attention", "true",
             "the attention output gate is not implemented with MLA");
  if (c.megatron && c.has_attention && c.model.attention.output_gate && o.fused_single_qkv_rope)
    c.reject("gdn.8", Exception::ValueError, "fused_single_qkv_rope", "true",
             "does not combine with the attention output gate");
  if (!c.has_gdn && !c.has_gdn2) return;

  // Row 9.
  if (c.megatron && o.fla_version.empty())
    c.reject("gdn.9", Exception::ImportError, "fla_version", "", "flash-linear-attention is not installed", {},
             "pip install flash-linear-attention");
  else if (c.megatron && c.has_gdn2 && !c.run.deterministic && !version_at_least(o.fla_version, "0.5.1"))
    c.reject("gdn.9", Exception::AssertionError, "fla_version", o.fla_version, "GDN2 needs FLA 0.5.1 or later", ">= 0.5.1");
  if (!(0 <= s.a_init_lo && s.a_init_lo <= s.a_init_hi)) // row 10
    c.reject("gdn.10", Exception::AssertionError, "A_init_range",
             fmt::format("[{}, {}]", s.a_init_lo, s.a_init_hi), "must satisfy 0 <= lo <= hi");
  // Row 11. The constructor checks the whole width; the GEMM runs on that of one rank.
  const std::int64_t width = c.has_gdn2 ? 4 * s.qk() + 3 * s.v() : 2 * s.qk() + 2 * s.v() + 2 * s.value_heads;
  const std::int64_t alignment = c.run.fp8_recipe == "mxfp8" ? 32 : 16;
  const std::int64_t local_alignment = c.run.fp8_recipe == "blockwise" ? 128 : alignment;
  if (c.fp8 && width % alignment != 0)
    c.reject("gdn.11", Exception::AssertionError, "fp8_recipe", c.run.fp8_recipe,
             fmt::format("in_proj is {} wide, not a multiple of {}", width, alignment));
  else if (c.fp8 && width / p.tp % local_alignment != 0)
    c.warn("gdn.11", "fp8_recipe", c.run.fp8_recipe,
           fmt::format("in_proj is {} wide on each of {} ranks, not a multiple of {}; the stack does not check it",
                       width / p.tp, p.tp, local_alignment),
           "keep beta and alpha in the original precision");
  // Row 12.
  if (splits_heads(c) && p.cp > 1) {
    std::vector<std::pair<const char*, std::int64_t>> sections{{"q", s.qk()}, {"k", s.qk()}, {"v", s.v()}, {"z", s.v()}};
    if (c.has_gdn2) sections.insert(sections.end(), {{"f", s.qk()}, {"b", s.qk()}, {"w", s.v()}});
    else sections.insert(sections.end(), {{"beta", s.value_heads}, {"alpha", s.value_heads}});
    for (auto [name, size] : sections)
      if (size / p.tp % p.cp != 0)
        c.reject("gdn.12", Exception::AssertionError, "context_parallel_size", number(p.cp),
                 fmt::format("does not divide section {} of in_proj, {} wide at tp {}", name, size / p.tp, p.tp));
  }
  // Row 13: FLA's kernels.
  if (!c.run.deterministic && o.activation != "silu" && o.activation != "swish")
    c.reject("gdn.13", Exception::AssertionError, "activation", o.activation, "the fused convolution knows silu only",
             "silu, swish", nearest(o.activation, {"silu", "swish"}));
  if (c.megatron && !c.run.deterministic && s.key_head_dim > 256)
    c.reject("gdn.13", Exception::AssertionError, "linear_key_head_dim", number(s.key_head_dim),
             "FLA's rule kernels hold at most 256", "<= 256");
}

// The first forward pass (rows 14 and 15); the offsets themselves are validate_packed's.
void check_gdn_forward(Check& c) {
  if (!c.has_gdn && !c.has_gdn2) return;
  const config::StackSettings& o = c.settings;
  if (o.packed && c.run.micro_batch != 1)
    c.reject("gdn.14", Exception::AssertionError, "micro_batch_size", number(c.run.micro_batch), "packed input is one row", "1");
  if (o.packed && c.run.deterministic)
    c.reject("gdn.14", Exception::AssertionError, "deterministic_mode", "true", "the deterministic rule knows no packed input");
  if (!c.megatron || c.run.revision.base != "dev") return;
  if (o.cp_partition == "contiguous" && o.linear_cp_mode == "headwise")
    c.reject("gdn.15", Exception::ValueError, "cp_partition", "contiguous", "head-wise GDN needs the zig-zag partition", "zigzag");
  if (o.conv_pad_alignment && o.linear_cp_mode == "chunkwise")
    c.reject("gdn.15", Exception::AssertionError, "conv_pad_alignment", "true",
             "does not combine with chunkwise context parallelism");
  if (c.run.parallel.cp > 1 && o.linear_cp_mode == "chunkwise" && !o.packed && c.run.micro_batch > 1)
    c.reject("gdn.15", Exception::ValueError, "micro_batch_size", number(c.run.micro_batch),
             "chunkwise context parallelism of unpacked input takes one sequence at a time", "1");
}

} // namespace gdn::model::rules
