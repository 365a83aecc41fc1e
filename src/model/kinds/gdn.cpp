#include "model/kinds/gdn.h"

#include <numeric>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::model {

namespace {

TensorId depthwise(Builder& b, std::string name, OpKind kind, TensorId qkv, ParamRef weight, const GdnAttr& attr,
                   std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(qkv).dtype, b.at(qkv).shape);
  Op& op = b.op(std::move(name), kind, {qkv}, {y}, attr);
  Step backward{.name = "backward", .reads = {qkv}, .grad_reads = {y}, .grad_writes = {qkv}, .param_grads = {0}};
  op.model_flops = 2.0 * static_cast<double>(b.at(qkv).elements()) * static_cast<double>(attr.kernel);
  op.params = {std::move(weight)};
  if (attr.conv_bias) {
    ParamRef bias = op.params[0];
    bias.name += ".bias";
    bias.elements /= attr.kernel;
    op.params.push_back(bias);
    backward.param_grads.push_back(1);
  }
  op.steps = {std::move(backward)};
  return y;
}

} // namespace

// Saved by the plain chunked rule, all fp32 [inferred from its source]: the rows and the leading
// i x i blocks cloned by the 63 steps of the forward substitution, sum(i^2 + i) = 87,360 values a
// chunk and head; about eleven [token, head, d] and six 64-wide tensors; one state a chunk.
std::vector<TensorId> plain_rule_intermediates(Builder& b, const GdnAttr& a) {
  const std::int64_t rows = a.chunks * 64, hv = a.value_heads; // padded to whole chunks
  return {b.statistic("rule_substitution", DType::FP32, {a.chunks, hv, 87360}),
          b.statistic("rule_rows", DType::FP32, {rows, hv, 6 * a.key_dim + 5 * a.value_dim}),
          b.statistic("rule_blocks", DType::FP32, {rows, hv, 6 * 64}),
          b.statistic("rule_states", DType::FP32, {a.chunks, hv, a.key_dim, a.value_dim})};
}

TensorId conv_silu(Builder& b, std::string name, TensorId qkv, ParamRef weight, const GdnAttr& attr, std::string out) {
  return depthwise(b, std::move(name), OpKind::ConvSilu, qkv, std::move(weight), attr, std::move(out));
}

TensorId conv(Builder& b, std::string name, TensorId qkv, ParamRef weight, const GdnAttr& attr, std::string out) {
  return depthwise(b, std::move(name), OpKind::Conv, qkv, std::move(weight), attr, std::move(out));
}

TensorId silu(Builder& b, std::string name, TensorId x, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, b.at(x).shape);
  Op& op = b.op(std::move(name), OpKind::Silu, {x}, {y});
  op.steps.push_back({.name = "backward", .reads = {x}, .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

L2NormOutputs l2_norm(Builder& b, std::string name, TensorId qk, const GdnAttr& attr, std::string out) {
  TensorId y = b.tensor(out, b.at(qk).dtype, {b.at(qk).rows(), 2 * attr.key_heads, attr.key_dim});
  TensorId rstd = b.statistic(out + "_rstd", DType::FP32, {b.at(qk).rows(), 2 * attr.key_heads});
  Op& op = b.op(std::move(name), OpKind::L2Norm, {qk}, {y, rstd}, attr);
  op.steps.push_back({.name = "backward", .reads = {y, rstd}, .grad_reads = {y}, .grad_writes = {qk}});
  return {y, rstd};
}

TensorId expand_heads(Builder& b, std::string name, TensorId x, std::int64_t heads, std::int64_t dim, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, {b.at(x).rows(), heads, dim});
  Op& op = b.op(std::move(name), OpKind::ExpandHeads, {x}, {y});
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

GateOutputs gates(Builder& b, std::string name, TensorId beta_logits, TensorId alpha, ParamRef a_log, ParamRef dt_bias,
                  const GdnAttr& attr, std::optional<DType> beta_dtype) {
  const std::int64_t rows = b.at(alpha).rows();
  TensorId g = b.tensor("g", DType::FP32, {rows, attr.value_heads});
  TensorId beta = b.tensor("beta", beta_dtype.value_or(b.at(beta_logits).dtype), {rows, attr.value_heads});
  std::vector<TensorId> outputs{g, beta}, saved{beta_logits, alpha};
  if (!attr.compiled) { // softplus keeps its input, the product its output; sigmoid keeps beta
    outputs.push_back(b.statistic("softplus_in", DType::FP32, {rows, attr.value_heads}));
    outputs.push_back(b.statistic("softplus_out", DType::FP32, {rows, attr.value_heads}));
    saved = {outputs[2], outputs[3], beta};
  }
  Op& op = b.op(std::move(name), OpKind::Gates, {beta_logits, alpha}, outputs, attr);
  op.params = {std::move(a_log), std::move(dt_bias)};
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {g, beta},
                      .grad_writes = {beta_logits, alpha}, .param_grads = {0, 1}});
  return {g, beta};
}

RuleOutputs gated_delta_rule(Builder& b, std::string name, TensorId q, TensorId k, TensorId v, TensorId g, TensorId beta,
                             const GdnAttr& attr) {
  const std::int64_t rows = b.at(v).rows(), hv = attr.value_heads;
  const DType dtype = b.at(v).dtype;
  RuleOutputs result{b.tensor("o", dtype, {rows, hv, attr.value_dim})};
  std::vector<TensorId> outputs{result.o}, saved;
  if (attr.deterministic) {
    saved = plain_rule_intermediates(b, attr);
    outputs.insert(outputs.end(), saved.begin(), saved.end());
  } else {
    result.g_cum = b.statistic("g_cum", DType::FP32, {rows, hv});
    result.a = b.statistic("A", dtype, {rows, hv, 64});
    outputs.insert(outputs.end(), {result.g_cum, result.a});
    saved = {q, k, v, beta, result.g_cum, result.a};
    if (attr.normalise) {
      TensorId q_hat = b.statistic("q_hat", dtype, b.at(q).shape), k_hat = b.statistic("k_hat", dtype, b.at(k).shape);
      TensorId q_rstd = b.statistic("q_rstd", DType::FP32, {rows, b.at(q).shape[1]});
      TensorId k_rstd = b.statistic("k_rstd", DType::FP32, {rows, b.at(k).shape[1]});
      outputs.insert(outputs.end(), {q_hat, k_hat, q_rstd, k_rstd});
      saved = {q_hat, k_hat, q_rstd, k_rstd, v, beta, result.g_cum, result.a};
    }
  }
  Op& op = b.op(std::move(name), OpKind::Rule, {q, k, v, g, beta}, outputs, attr);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {result.o}, .grad_writes = {q, k, v, g, beta}});
  // Megatron's count: the recurrence with dv in place of dk (its own quirk, kept so that TFLOP/s compare).
  op.model_flops = 8.0 * static_cast<double>(rows * hv) * static_cast<double>(attr.value_dim * attr.value_dim);
  return result;
}

TensorId gated_norm(Builder& b, std::string name, TensorId o, TensorId z, ParamRef weight, const GdnAttr& attr,
                    bool keep_normalised, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(o).dtype, b.at(o).shape);
  TensorId rstd = b.statistic("o_rstd", DType::FP32, {b.at(o).rows(), attr.value_heads});
  std::vector<TensorId> outputs{y, rstd}, saved{o, rstd};
  if (attr.compiled) {
    saved.push_back(z);
  } else { // z in fp32, and its SiLU
    for (const char* kept : {"z_fp32", "z_silu"}) {
      outputs.push_back(b.statistic(kept, DType::FP32, b.at(z).shape));
      saved.push_back(outputs.back());
    }
  }
  if (keep_normalised || !attr.compiled) {
    outputs.push_back(b.statistic("o_norm", b.at(o).dtype, b.at(o).shape));
    saved.push_back(outputs.back());
  }
  Op& op = b.op(std::move(name), OpKind::GatedNorm, {o, z}, outputs, attr);
  op.params = {std::move(weight)};
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {y}, .grad_writes = {o, z}, .param_grads = {0}});
  return y;
}

std::vector<std::int64_t> head_sections(const GdnAttr& a, std::int64_t columns, std::int64_t ranks) {
  const std::int64_t qk = a.key_heads * a.key_dim * ranks, v = a.value_heads * a.value_dim * ranks, gate = a.value_heads * ranks;
  for (std::vector<std::int64_t> sections : {std::vector{qk, qk, v, v, gate, gate}, std::vector{qk, qk, v, v, qk, qk, v}})
    if (std::accumulate(sections.begin(), sections.end(), std::int64_t{0}) == columns) return sections;
  throw Error(ErrorCode::Internal, fmt::format("{} columns are no projection of {} key and {} value heads", columns, a.key_heads, a.value_heads));
}

} // namespace gdn::model
