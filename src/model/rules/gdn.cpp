#include <charconv>

#include <fmt/format.h>

#include "core/error.h"
#include "model/rules/check.h"

// Attention variant, heads and the shape of GDN: rows 1 to 6 of the list "GDN dimensions and
// runtime" of the stack's rules.
namespace gdn::model::rules {

namespace {

std::vector<std::string> known_variants(const Revision& revision) {
  if (revision.base == "main") return {"gdn", "gdn2", "dsa", "gated_delta_net"};
  if (revision.base == "dev") return {"gated_delta_net", "dsa", "dsv4_hybrid"};
  return {"gated_delta_net", "dsa"};
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
    return c.reject(
        "gdn.6", Exception::ValueError, key, text, "is neither an integer nor a list",
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
    c.warn("gdn.1", "experimental_attention_variant", given,
           "DeprecationWarning: the name is now gdn");
  const std::vector<std::string> known = known_variants(revision);
  if (c.megatron && !given.empty() && !contains(known, given))
    c.reject("gdn.variant", Exception::ValueError, "experimental_attention_variant", given,
             fmt::format("is not a variant of {}", revision.text()),
             fmt::format("{}", fmt::join(known, ", ")), nearest(given, known));
  else if (c.megatron && c.has_gdn2 && !contains(known, "gdn2"))
    c.reject("gdn.variant", Exception::ValueError, "revision", revision.text(),
             "has no GDN2 layers", "main");

  // Row 2.
  const config::AttentionShape& a = c.model.attention;
  const std::int64_t tp = c.run.parallel.tp;
  if (c.has_attention && a.heads % tp != 0)
    c.reject("gdn.2", Exception::ValueError, "tensor_model_parallel_size", number(tp),
             fmt::format("does not divide num_attention_heads = {}", a.heads));
  if (c.has_attention && a.kv_heads > 0 && a.kv_heads % tp != 0 && tp % a.kv_heads != 0)
    c.reject(
        "gdn.2", Exception::ValueError, "tensor_model_parallel_size", number(tp),
        fmt::format("is neither a divisor nor a multiple of num_query_groups = {}", a.kv_heads));
}

void check_gdn_dimensions(Check& c) {
  const bool present = c.has_gdn || c.has_gdn2;
  if (!present && c.variant == "gdn") // row 3
    c.reject("gdn.3", Exception::AssertionError, "experimental_attention_variant",
             c.run.attention_variant, "needs linear_attention_freq: the model has no GDN layer");
  if (!present && c.variant == "gdn2")
    c.reject("gdn.3", Exception::ValueError, "experimental_attention_variant",
             c.run.attention_variant, "needs linear_attention_freq: the model has no GDN2 layer");
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
  const std::int64_t degree = p.tp * (c.splits_heads() ? p.cp : 1);
  const char* key = degree == p.tp ? "tensor_model_parallel_size"
                                   : "tensor_model_parallel_size x context_parallel_size";
  for (auto [name, symbol, heads] : {std::tuple{"linear_num_key_heads", "hk", s.key_heads},
                                     {"linear_num_value_heads", "hv", s.value_heads}})
    if (heads % degree != 0)
      c.reject("gdn.4", Exception::AssertionError, key, number(degree),
               fmt::format("does not divide {} ({} = {})", name, symbol, heads),
               legal_degrees(s.key_heads, s.value_heads));

  if (c.run.l2norm == config::L2Norm::Kernel && c.megatron) {
    if (!c.run.revision.has("l2norm_kernel"))
      c.reject("plan.l2norm", Exception::Plan, "l2norm", "kernel",
               fmt::format("revision {} normalises q and k before the rule kernel",
                           c.run.revision.text()),
               "caller", "add +l2norm_kernel to the revision");
    if (c.has_gdn2)
      c.reject("plan.l2norm", Exception::Plan, "l2norm", "kernel",
               "GDN2 keeps the normalisation with the caller whatever the revision", "caller");
  }
}

} // namespace gdn::model::rules
