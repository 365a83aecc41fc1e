#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"

// What a model is: sizes only, no parallelism and no run settings. Symbols in comments are those of
// the papers and of Megatron-LM.
namespace gdn::config {

enum class LayerKind { Gdn, Gdn2, Attention, Unmodelled }; // the token mixer of a layer
enum class MlpKind { Moe, Dense };

std::string_view name_of(LayerKind kind); // "gdn", "gdn2", "attention", "unmodelled"
std::string_view name_of(MlpKind kind);   // "moe", "mlp"

// Gated DeltaNet mixer. Hv % Hk == 0; q and k have Hk heads of dk, v and the output gate Hv of dv.
struct GdnShape {
  std::int64_t key_heads = 16;     // Hk, linear_num_key_heads
  std::int64_t value_heads = 32;   // Hv, linear_num_value_heads
  std::int64_t key_head_dim = 128; // dk
  std::int64_t value_head_dim = 128; // dv
  std::int64_t conv_kernel = 4;    // K, linear_conv_kernel_dim
  bool bias = false;               // in_proj and out_proj
  bool conv_bias = false;
  bool use_qk_l2norm = true;       // false: neither caller nor kernel normalises
  double a_init_lo = 1, a_init_hi = 16;     // A_init_range
  std::optional<double> conv_init = {};     // uniform +-conv_init; unset: torch default
  bool negative_eigenvalues = false;        // beta doubled (Olmo-Hybrid)
  double norm_eps = 1e-6;

  std::int64_t qk() const { return key_heads * key_head_dim; }     // QK
  std::int64_t v() const { return value_heads * value_head_dim; }  // V
  std::int64_t conv_channels() const { return 2 * qk() + v(); }    // C
  std::int64_t expansion() const { return value_heads / key_heads; } // r
};

// Full attention, grouped query.
struct AttentionShape {
  std::int64_t heads = 16;      // n
  std::int64_t kv_heads = 2;    // g, num_query_groups
  std::int64_t head_dim = 256;  // d, kv_channels
  bool output_gate = true;      // sigmoid gate, q_proj twice as wide
  bool qk_norm = true;          // per-head RMSNorm on q and k
  bool whole_vector_qk_norm = false; // norm over all heads at once (Olmo-Hybrid)
  bool qkv_bias = false;
  bool rope = true;
  double rotary_fraction = 0.25;
  double rope_theta = 1e7;
};

struct MoeShape {
  std::int64_t experts = 0;      // E
  std::int64_t top_k = 0;        // k
  std::int64_t ffn = 0;          // f, moe_ffn_hidden_size
  std::int64_t shared_ffn = 0;   // fs; 0: no shared expert
  bool shared_gate = true;       // sigmoid gate on the shared expert
  bool renormalise = true;       // norm_topk_prob
  double aux_loss_coeff = 1e-3;
  double z_loss_coeff = 0;
  DType router_dtype = DType::FP32; // moe_router_dtype: dtype of logits and probabilities
  std::string score = "softmax"; // softmax | sigmoid
};

// Vision tower: parameters are exact, activations a named unmodelled row.
struct VisionShape {
  std::int64_t depth = 0, hidden = 0, heads = 0, ffn = 0, out = 0;
};

struct Model {
  std::string name;
  std::vector<std::string> aliases = {};
  std::string source = {};            // where the figures come from
  std::int64_t hidden = 0;            // h
  std::int64_t vocab = 0;             // V, before padding
  bool tied_embeddings = false;
  double norm_eps = 1e-6;
  bool zero_centred_norm = true;      // weight applied as 1 + w
  std::vector<LayerKind> mixers;      // one per decoder layer
  std::vector<MlpKind> mlps;          // one per decoder layer
  GdnShape gdn = {};
  AttentionShape attention = {};
  MoeShape moe = {};
  std::int64_t ffn = 0;               // dense MLP width (ff)
  std::int64_t mtp_layers = 0;        // M; built from the last decoder layer's kind
  std::optional<VisionShape> vision = {};
  // Some layers have no op list: only parameter totals are known, and `plan` refuses naming the kind.
  bool parameters_only = false;
  std::string unmodelled_kind = {};   // "KDA", "JetBlock", ...
  std::int64_t published_text = 0, published_vision = 0, published_mtp = 0, published_total = 0;
  std::string parameters_source = {}; // who published these counts, or that they are computed
  // Sizes of unmodelled layers beyond the shapes above, read by src/model/unmodelled.cpp.
  // "KDA": low_rank; its attention layers are MLA: mla_kv_rank, mla_nope_dim, mla_rope_dim,
  // mla_value_dim. "JetBlock": generator_divisor. Heads, head dims and taps are `gdn`'s.
  std::map<std::string, std::int64_t> unmodelled_sizes = {};
  // Parameters of models without op lists, by part, written in the profile ("a named formula").
  std::int64_t unmodelled_text_parameters = 0;

  std::int64_t layers() const { return static_cast<std::int64_t>(mixers.size()); } // L
};

} // namespace gdn::config
