#include <fmt/core.h>

#include "core/error.h"
#include "model/rules/check.h"

// What GDN layers check when they are built (rows 7 to 13) and when they run (rows 14 and 15).
namespace gdn::model::rules {

void check_gdn_construction(Check& c) {
  const config::StackSettings& o = c.settings;
  const config::GdnShape& s = c.model.gdn;
  const config::Parallel& p = c.run.parallel;
  if (c.megatron && !c.variant.empty() && c.run.build == config::Build::Local) // row 7
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
    c.reject("gdn.9", Exception::ImportError, "fla_version", "",
             "flash-linear-attention is not installed", {}, "pip install flash-linear-attention");
  else if (c.megatron && c.has_gdn2 && !c.run.deterministic &&
           !version_at_least(o.fla_version, "0.5.1"))
    c.reject("gdn.9", Exception::AssertionError, "fla_version", o.fla_version,
             "GDN2 needs FLA 0.5.1 or later", ">= 0.5.1");
  if (!(0 <= s.a_init_lo && s.a_init_lo <= s.a_init_hi)) // row 10
    c.reject("gdn.10", Exception::AssertionError, "A_init_range",
             fmt::format("[{}, {}]", s.a_init_lo, s.a_init_hi), "must satisfy 0 <= lo <= hi");
  // Row 11. The constructor checks the whole width; the GEMM runs on that of one rank.
  const std::int64_t width =
      c.has_gdn2 ? 4 * s.qk() + 3 * s.v() : 2 * s.qk() + 2 * s.v() + 2 * s.value_heads;
  const std::int64_t alignment = c.run.fp8_recipe == "mxfp8" ? 32 : 16;
  const std::int64_t local_alignment = c.run.fp8_recipe == "blockwise" ? 128 : alignment;
  if (c.fp8 && width % alignment != 0)
    c.reject("gdn.11", Exception::AssertionError, "fp8_recipe", c.run.fp8_recipe,
             fmt::format("in_proj is {} wide, not a multiple of {}", width, alignment));
  else if (c.fp8 && width / p.tp % local_alignment != 0)
    c.warn("gdn.11", "fp8_recipe", c.run.fp8_recipe,
           fmt::format("in_proj is {} wide on each of {} ranks, not a multiple of {}; the stack "
                       "does not check it",
                       width / p.tp, p.tp, local_alignment),
           "keep beta and alpha in the original precision");
  // Row 12.
  if (c.splits_heads() && p.cp > 1) {
    std::vector<std::pair<const char*, std::int64_t>> sections{
        {"q", s.qk()}, {"k", s.qk()}, {"v", s.v()}, {"z", s.v()}};
    if (c.has_gdn2)
      sections.insert(sections.end(), {{"f", s.qk()}, {"b", s.qk()}, {"w", s.v()}});
    else
      sections.insert(sections.end(), {{"beta", s.value_heads}, {"alpha", s.value_heads}});
    for (auto [name, size] : sections)
      if (size / p.tp % p.cp != 0)
        c.reject("gdn.12", Exception::AssertionError, "context_parallel_size", number(p.cp),
                 fmt::format("does not divide section {} of in_proj, {} wide at tp {}", name,
                             size / p.tp, p.tp));
  }
  // Row 13: FLA's kernels.
  if (!c.run.deterministic && o.activation != "silu" && o.activation != "swish")
    c.reject("gdn.13", Exception::AssertionError, "activation", o.activation,
             "the fused convolution knows silu only", "silu, swish",
             nearest(o.activation, {"silu", "swish"}));
  if (c.megatron && !c.run.deterministic && s.key_head_dim > 256)
    c.reject("gdn.13", Exception::AssertionError, "linear_key_head_dim", number(s.key_head_dim),
             "FLA's rule kernels hold at most 256", "<= 256");
}

// The first forward pass (rows 14 and 15); the offsets themselves are validate_packed's.
void check_gdn_forward(Check& c) {
  if (!c.has_gdn && !c.has_gdn2) return;
  const config::StackSettings& o = c.settings;
  if (o.packed && c.run.micro_batch != 1)
    c.reject("gdn.14", Exception::AssertionError, "micro_batch_size", number(c.run.micro_batch),
             "packed input is one row", "1");
  if (o.packed && c.run.deterministic)
    c.reject("gdn.14", Exception::AssertionError, "deterministic_mode", "true",
             "the deterministic rule knows no packed input");
  if (!c.megatron || c.run.revision.base != "dev") return;
  if (o.cp_partition == "contiguous" && o.linear_cp_mode == "headwise")
    c.reject("gdn.15", Exception::ValueError, "cp_partition", "contiguous",
             "head-wise GDN needs the zig-zag partition", "zigzag");
  if (o.conv_pad_alignment && o.linear_cp_mode == "chunkwise")
    c.reject("gdn.15", Exception::AssertionError, "conv_pad_alignment", "true",
             "does not combine with chunkwise context parallelism");
  if (c.run.parallel.cp > 1 && o.linear_cp_mode == "chunkwise" && !o.packed &&
      c.run.micro_batch > 1)
    c.reject("gdn.15", Exception::ValueError, "micro_batch_size", number(c.run.micro_batch),
             "chunkwise context parallelism of unpacked input takes one sequence at a time", "1");
}

} // namespace gdn::model::rules
