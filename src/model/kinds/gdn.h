#pragma once
#include <optional>
#include <string>
#include <vector>

#include "model/builder.h"

// The ops of a Gated DeltaNet mixer. Shapes: R = rows the rule sees (all tokens of the sequences,
// after the context-parallel exchange), heads are this rank's.
namespace gdn::model {

// Causal depthwise conv + SiLU over qkv [R, C]. Backward reads its input (a view of the projection)
// and recomputes the pre-activation.
TensorId conv_silu(Builder& b, std::string name, TensorId qkv, ParamRef weight, const GdnAttr& attr, std::string out);

// The two halves of conv_silu as ops of their own (deterministic mode): backward of the convolution
// reads its input, that of the activation the pre-activation.
TensorId conv(Builder& b, std::string name, TensorId qkv, ParamRef weight, const GdnAttr& attr, std::string out);
TensorId silu(Builder& b, std::string name, TensorId x, std::string out);

struct L2NormOutputs {
  TensorId y;    // [R, 2 Hk, dk]
  TensorId rstd; // [R, 2 Hk] fp32
};
// Per-head L2 norm of the q|k columns, eps added under the root. Backward reads its output and rstd.
L2NormOutputs l2_norm(Builder& b, std::string name, TensorId qk, const GdnAttr& attr, std::string out);

// Repeats Hk heads to Hv, contiguous; always a new storage. Backward sums each group.
TensorId expand_heads(Builder& b, std::string name, TensorId x, std::int64_t heads, std::int64_t dim, std::string out);

struct GateOutputs {
  TensorId g;    // [R, Hv] fp32, log decay
  TensorId beta; // [R, Hv], write strength
};
// g = -exp(A_log) softplus(alpha + dt_bias), beta = sigmoid(b). Backward reads the raw logits; not
// compiled, the softplus' fp32 input and output and beta. beta has
// their dtype unless one is given.
GateOutputs gates(Builder& b, std::string name, TensorId beta_logits, TensorId alpha, ParamRef a_log, ParamRef dt_bias,
                  const GdnAttr& attr, std::optional<DType> beta_dtype = {});

struct RuleOutputs {
  TensorId o;          // [R, Hv, dv]
  TensorId g_cum = -1; // [R, Hv] fp32, chunk-local inclusive sum of g
  TensorId a = -1;     // [R, Hv, 64], the chunk's triangular inverse
};
// The chunked gated delta rule (chunk 64). With attr.normalise it also makes its own normalised q
// and k (same shapes) and their reciprocal norms, which backward reads instead of q and k. With
// attr.deterministic it is the plain chunked form under autograd, whose fp32 intermediates are kept
// in place of g_cum and a.
RuleOutputs gated_delta_rule(Builder& b, std::string name, TensorId q, TensorId k, TensorId v, TensorId g, TensorId beta,
                             const GdnAttr& attr);

// The statistics that the plain chunked rule keeps; for both rules.
std::vector<TensorId> plain_rule_intermediates(Builder& b, const GdnAttr& attr);

// RMSNorm over dv times silu(z): o, z [R, Hv, dv] -> [R, Hv, dv]. Backward reads o, z and rstd, and
// the normalised o where `keep_normalised` (a compiler boundary between norm and gate). Not compiled,
// it reads the normalised o and, in place of z, fp32 z and silu(z).
TensorId gated_norm(Builder& b, std::string name, TensorId o, TensorId z, ParamRef weight, const GdnAttr& attr,
                    bool keep_normalised, std::string out);

// Columns of the sections of in_proj's output ("q", "k", "v", "z", then the gates') when each holds the heads of
// `ranks` ranks: of GDN or GDN2, whichever is `columns` wide. Throws Error{Internal} for neither.
std::vector<std::int64_t> head_sections(const GdnAttr& attr, std::int64_t columns, std::int64_t ranks);

} // namespace gdn::model
