#include "model/kinds/attention.h"

#include <fmt/core.h>

#include "core/error.h"
#include "model/kinds/plumbing.h"

namespace gdn::model {

TensorId head_norm(Builder& b, std::string name, TensorId x, ParamRef weight, NormAttr attr,
                   std::vector<std::int64_t> shape, std::string out) {
  const std::int64_t statistics = b.at(x).elements() / attr.group;
  TensorId y = b.tensor(out, b.at(x).dtype, std::move(shape));
  TensorId rstd = b.statistic(out + "_rstd", DType::FP32, {statistics});
  Op& op = b.op(std::move(name), OpKind::HeadNorm, {x}, {y, rstd}, attr);
  op.params = {std::move(weight)};
  op.steps.push_back({.name = "backward", .reads = {x, rstd}, .grad_reads = {y}, .grad_writes = {x}, .param_grads = {0}});
  return y;
}

TensorId rope(Builder& b, std::string name, TensorId x, const AttentionAttr& attr, std::string out) {
  TensorId y = b.tensor(std::move(out), b.at(x).dtype, b.at(x).shape);
  Op& op = b.op(std::move(name), OpKind::Rope, {x}, {y}, attr);
  op.steps.push_back({.name = "backward", .grad_reads = {y}, .grad_writes = {x}});
  return y;
}

namespace {

struct CoreCollectives {
  std::vector<Collective> forward, backward;
};

// What moves during one core; `kv`: bytes of this rank's k and v together.
CoreCollectives core_collectives(const std::string& type, std::int64_t cp, Bytes kv) {
  auto move = [&](CollectiveKind kind, Bytes bytes) { return Collective{kind, Group::Cp, cp, bytes}; };
  if (cp == 1) return {};
  if (type == "p2p" || type == "a2a+p2p") // the hierarchical form is priced as its ring
    return {{move(CollectiveKind::P2p, (cp - 1) * kv)}, {move(CollectiveKind::P2p, 2 * (cp - 1) * kv)}};
  if (type == "all_gather")
    return {{move(CollectiveKind::AllGather, cp * kv)},
            {move(CollectiveKind::AllGather, cp * kv), move(CollectiveKind::ReduceScatter, cp * kv)}};
  throw Error(ErrorCode::Config,
              fmt::format("cp_comm_type '{}' is unknown{}", type, did_you_mean(type, {"p2p", "all_gather", "a2a", "a2a+p2p"})),
              "one of p2p, all_gather, a2a, a2a+p2p");
}

TensorId core(Builder& b, TensorId q, TensorId k, TensorId v, const AttentionAttr& attr, CoreCollectives collectives, const std::string& out) {
  const std::int64_t rows = b.at(q).rows();
  const DType dtype = b.at(q).dtype;
  TensorId o = b.tensor(out, dtype, b.at(q).shape);
  std::vector<TensorId> outputs{o}, saved{q, k, v};
  if (attr.fused) {
    outputs.push_back(b.statistic(out + "_lse", DType::FP32, {rows, attr.heads}));
    saved.push_back(o); // for the row sums of o * d:o
  } else {
    const std::vector<std::int64_t> square{attr.heads, rows, attr.seq};
    outputs.push_back(b.statistic(out + "_scores", dtype, square));
    outputs.push_back(b.statistic(out + "_probs", dtype, square));
    if (attr.dropout > 0) outputs.push_back(b.statistic(out + "_mask", DType::Bool, square));
  }
  saved.insert(saved.end(), outputs.begin() + 1, outputs.end());
  Op& op = b.op("core_attention", OpKind::CoreAttention, {q, k, v}, outputs, attr);
  op.collectives = std::move(collectives.forward);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {o}, .grad_writes = {q, k, v},
                      .collectives = std::move(collectives.backward)});
  // Two products over half the square.
  op.model_flops = 2.0 * static_cast<double>(rows * attr.heads * attr.head_dim) * static_cast<double>(attr.seq);
  return o;
}

} // namespace

TensorId core_attention(Builder& b, TensorId q, TensorId k, TensorId v, AttentionAttr attr, const std::string& type, std::int64_t cp) {
  if (cp == 1 || type != "a2a") return core(b, q, k, v, attr, core_collectives(type, cp, b.at(k).bytes() + b.at(v).bytes()), "attn");
  if (attr.heads % cp != 0 || attr.kv_heads % cp != 0)
    throw Error(ErrorCode::Config,
                fmt::format("cp_comm_type a2a: {} attention heads and {} key-value heads a TP rank do not divide by "
                            "context_parallel_size {} (AssertionError in Transformer Engine)", attr.heads, attr.kv_heads, cp),
                "use cp_comm_type p2p or all_gather, or a smaller context_parallel_size");
  const std::int64_t tokens = b.at(q).rows(), heads = attr.heads, dim = attr.head_dim;
  attr.heads /= cp;
  attr.kv_heads /= cp;
  q = all_to_all(b, "cp_a2a_q", q, "q_heads", {cp * tokens, attr.heads, dim}, cp);
  k = all_to_all(b, "cp_a2a_k", k, "k_heads", {cp * tokens, attr.kv_heads, dim}, cp);
  v = all_to_all(b, "cp_a2a_v", v, "v_heads", {cp * tokens, attr.kv_heads, dim}, cp);
  TensorId o = core(b, q, k, v, attr, {}, "attn_heads");
  return all_to_all(b, "cp_a2a_out", o, "attn", {tokens, heads, dim}, cp);
}

TensorId output_gate(Builder& b, std::string name, TensorId o, TensorId gate, std::string out, bool compiled) {
  TensorId y = b.tensor(out, b.at(o).dtype, b.at(o).shape);
  std::vector<TensorId> outputs{y}, saved{o, gate};
  if (!compiled) {
    outputs.push_back(b.statistic(out + "_sigmoid", DType::FP32, b.at(o).shape));
    saved.push_back(outputs.back());
  }
  Op& op = b.op(std::move(name), OpKind::OutputGate, {o, gate}, outputs);
  op.steps.push_back({.name = "backward", .reads = saved, .grad_reads = {y}, .grad_writes = {o, gate}});
  return y;
}

} // namespace gdn::model
