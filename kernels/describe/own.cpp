#include "kernels/describe/own.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/attention/core.h"
#include "kernels/common/reduce.h"
#include "kernels/describe/ranks.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/conv.h"
#include "kernels/gdn/gated_norm.h"
#include "kernels/gdn/gates.h"
#include "kernels/gdn/gdn2.h"
#include "kernels/gdn/gdn_pre.h"
#include "kernels/gemm/gemm.h"
#include "kernels/loss/embedding.h"
#include "kernels/norm/head_norm.h"
#include "model/static_state.h"
#include "model/upstream.h"

namespace gdn::kernels {

using namespace model;
using upstream::is_forward;
using upstream::memory_bound;
using upstream::step_of;

namespace {

// ---------------------------------------------------------------------------------- plumbing ----

Work nothing(const OpList&, const Op&, int) { return {.kernels = 0}; }

// One pass over what the op touches.
Work pass(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Elementwise); }

Work view(const OpList& list, const Op& op, int step) {
  Work w = is_forward(step) ? nothing(list, op, step) : pass(list, op, step);
  if (!is_forward(step)) w.kernels = static_cast<int>(op.outputs.size());
  return w;
}

Work moved(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Permute); }

// Between ranks: packed by destination into one buffer, received in another, unpacked.
Work all_to_all(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Permute, 2 * list.tensor(op.inputs[0]).bytes(), 2, 2);
}

// Received rank by rank; one more copy puts columns side by side.
Work gather_columns(const OpList& list, const Op& op, int step) {
  const bool copies = is_forward(step) || !step_of(op, step).collectives.empty();
  return memory_bound(list, op, step, Family::Permute, copies ? list.tensor(op.outputs[0]).bytes() : 0, 1, copies ? 2 : 1);
}

// --------------------------------------------------------------------------- norms and linears ----

Work norm_work(const OpList& list, const Op& op, int step, std::int64_t units, std::int64_t width) {
  if (is_forward(step)) return memory_bound(list, op, step, Family::Norm);
  return memory_bound(list, op, step, Family::Norm, head_norm_backward_scratch(units, width), 3);
}

Work rms_norm(const OpList& list, const Op& op, int step) {
  const Tensor& x = list.tensor(op.inputs[0]);
  const std::int64_t group = std::get<NormAttr>(op.attr).group, width = group > 0 ? group : x.cols();
  return norm_work(list, op, step, x.elements() / width, width);
}
Work l2_norm(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Norm); }

// cuBLASLt, with the workspace it is given. A gradient in fp32 beside bf16 operands (router logits) becomes a sum of
// two bf16 matrices, each multiplied.
Work linear(const OpList& list, const Op& op, int step) {
  const LinearAttr& a = std::get<LinearAttr>(op.attr);
  const Tensor &x = list.tensor(op.inputs[0]), &y = list.tensor(op.outputs[0]);
  const ParamRef& weight = op.params[0];
  // Under sequence parallelism one side is whole here: the gathered input, the output before it is scattered.
  const bool shared = a.tp > 1 && a.sequence_parallel, gathers = shared && a.mode == TensorParallel::Column, scatters = shared && a.mode == TensorParallel::Row;
  const std::int64_t in = gathers ? a.tp : 1, out = scatters ? a.tp : 1;
  Work w;
  w.family = Family::Gemm;
  w.flops = 2.0 * static_cast<double>(in * x.rows()) * static_cast<double>(weight.elements);
  w.traffic = in * x.bytes() + out * y.bytes() + weight.elements * size_of(weight.dtype);
  w.scratch = kGemmWorkspace;
  if (gathers) w.scratch += round_up(in * x.bytes(), 256);
  if (scatters) w.scratch += round_up(out * y.bytes(), 256);
  if (!is_forward(step)) {
    const bool wgrad = !step_of(op, step).param_grads.empty();
    if (wgrad) w.traffic += weight.elements * (8 - size_of(weight.dtype));
    if (wgrad && op.params.size() > 1) w.scratch = std::max(w.scratch, column_sums_scratch(y.rows(), y.cols()));
    if (x.dtype != y.dtype) {
      w.scratch += 2 * round_up(y.elements() * size_of(x.dtype), 256);
      w.flops *= 2;
      w.kernels = 3;
    }
  }
  w.size = w.flops;
  return w;
}

Work grouped_linear(const OpList& list, const Op& op, int step) { return upstream::grouped_linear(list, op, step); }

// ------------------------------------------------------------------------------- gated delta net ----

Work conv(const OpList& list, const Op& op, int step) {
  const Tensor& x = list.tensor(op.inputs[0]);
  if (is_forward(step)) return memory_bound(list, op, step, Family::Conv);
  return memory_bound(list, op, step, Family::Conv, conv_backward_scratch(x.rows(), x.cols()), 3);
}

Work gates(const OpList& list, const Op& op, int step) {
  const Tensor& alpha = list.tensor(op.inputs[1]);
  if (is_forward(step)) return memory_bound(list, op, step, Family::Elementwise, 0, 2);
  return memory_bound(list, op, step, Family::Elementwise, decay_backward_scratch(alpha.rows(), alpha.cols()), 4);
}

Bytes fp32_beta(const OpList& list, const Op& op) { // beta in fp32, where the op has it in another dtype
  const Tensor& beta = list.tensor(op.inputs[4]);
  return beta.dtype == DType::FP32 ? 0 : round_up(beta.elements() * 4, 256);
}

// FLOPs and bytes of the kernels: kernels/gdn/NOTES.md, per token and value head at r value heads a key head. Behind
// the kernels' scratch: beta, its gradient, and gradients of q and k before the norm's, where the op has such.
Work rule(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const GdnShape s = gdn_shape_of(list, op);
  const Tensor &q = list.tensor(op.inputs[0]), &v = list.tensor(op.inputs[2]);
  const double token_heads = static_cast<double>(v.rows() * a.value_heads);
  const double r = static_cast<double>(s.value_heads) / static_cast<double>(s.key_heads);
  const double unit = 64.0 * static_cast<double>(a.key_dim + a.value_dim); // one C x C x d product of a token
  Work w;
  w.family = Family::Rule;
  if (is_forward(step)) {
    w.scratch = gdn_chunk_forward_scratch(s) + fp32_beta(list, op);
    w.flops = token_heads * unit * (8 + 2 / r);
    w.traffic = static_cast<Bytes>(token_heads * (512 / r + 1088));
    w.kernels = 2 + (a.normalise ? 2 : 0) + (fp32_beta(list, op) > 0);
  } else {
    w.scratch = gdn_chunk_backward_scratch(s) + 2 * fp32_beta(list, op);
    if (a.normalise) w.scratch += 2 * round_up(q.bytes(), 256);
    w.flops = token_heads * unit * (25 + 4 / r);
    w.traffic = static_cast<Bytes>(token_heads * (1792 / r + 5004));
    w.kernels = 4 + (a.normalise ? 2 : 0) + (fp32_beta(list, op) > 0 ? 2 : 0);
  }
  w.size = w.flops;
  return w;
}

Work gated_norm(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const Tensor& o = list.tensor(op.inputs[0]);
  const bool keeps = op.outputs.size() > 2;
  const std::int64_t rows = o.rows() * a.value_heads;
  if (is_forward(step)) return memory_bound(list, op, step, Family::Norm, 0, keeps ? 2 : 1);
  const Bytes scratch = keeps ? round_up(o.elements() * 4, 256) + head_norm_backward_scratch(rows, a.value_dim)
                              : gated_norm_backward_scratch(o.rows(), static_cast<int>(a.value_heads), static_cast<int>(a.value_dim));
  return memory_bound(list, op, step, Family::Norm, scratch, keeps ? 4 : 2);
}

Work gdn_pre(const OpList& list, const Op& op, int step) {
  if (is_forward(step)) return memory_bound(list, op, step, Family::Conv);
  return memory_bound(list, op, step, Family::Conv, gdn_pre_backward_scratch(gdn_shape_of(list, op)), 3);
}

// GDN2: plain kernels; the repeated gates, the convolution and its gradient, the states are scratch.
Work gdn2_gates(const OpList& list, const Op& op, int step) {
  const Tensor& f = list.tensor(op.inputs[0]);
  const Bytes wide = round_up(f.elements() * 4, 256);
  if (is_forward(step)) return memory_bound(list, op, step, Family::Elementwise, wide + round_up(f.elements() * 2, 256), 5);
  return memory_bound(list, op, step, Family::Elementwise, 2 * wide + decay_backward_scratch(f.rows(), f.cols()), 8);
}
Work gdn2_rule(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  Work w = memory_bound(list, op, step, Family::Rule, is_forward(step) ? 0 : gdn2_backward_scratch(gdn_shape_of(list, op)), is_forward(step) ? 4 : 5);
  w.flops = static_cast<double>(list.tensor(op.inputs[2]).rows() * a.value_heads * a.key_dim * a.value_dim) * (is_forward(step) ? 7 : 30);
  w.size = w.flops;
  return w;
}
Work gdn2_pre(const OpList& list, const Op& op, int step) {
  const Tensor &qkv = list.tensor(op.inputs[0]), &f = list.tensor(op.inputs[1]);
  const Bytes rows = round_up(qkv.elements() * 2, 256);
  if (is_forward(step)) return memory_bound(list, op, step, Family::Conv, rows, 7, 2);
  return memory_bound(list, op, step, Family::Conv,
                      2 * rows + std::max(conv_backward_scratch(qkv.rows(), qkv.cols()), decay_backward_scratch(f.rows(), f.cols())), 14, 3);
}

// ------------------------------------------------------------------------------------- attention ----

Work attention_pre(const OpList& list, const Op& op, int step) {
  const AttentionAttr& a = std::get<AttentionAttr>(op.attr);
  Bytes scratch = 0;
  if (!is_forward(step) && a.qk_norm != QkNorm::None)
    for (size_t i : {0, 1}) {
      const Tensor& y = list.tensor(op.outputs[i]);
      const std::int64_t width = a.qk_norm == QkNorm::WholeVector ? y.cols() : a.head_dim;
      scratch = std::max(scratch, head_norm_backward_scratch(y.elements() / width, width));
    }
  return memory_bound(list, op, step, Family::Norm, scratch, is_forward(step) ? 3 : 5);
}

// Half of the square; backward makes the scores and d_o v^T twice: seven products for five.
Work core_attention(const OpList& list, const Op& op, int step) {
  const AttentionAttr& a = std::get<AttentionAttr>(op.attr);
  const Tensor& q = list.tensor(op.inputs[0]);
  const double products = 2.0 * static_cast<double>(q.rows() * a.heads * a.head_dim) * static_cast<double>(a.seq); // two
  Work w = memory_bound(list, op, step, Family::Attention, 0, is_forward(step) ? 1 : 3);
  w.flops = is_forward(step) ? products : 3.5 * products;
  if (!is_forward(step)) w.scratch = attention_backward_scratch(q.rows(), std::max(a.sequences, ceil_div(q.rows(), kChunk)), a.heads);
  w.size = w.flops;
  return w;
}

// ---------------------------------------------------------------------------- mixture of experts ----

// Counts of the slots, and one loss value a token.
Work router(const OpList& list, const Op& op, int step) {
  const std::int64_t tokens = list.tensor(op.inputs[0]).rows(), experts = std::get<MoeAttr>(op.attr).experts;
  return memory_bound(list, op, step, Family::Router, round_up(experts * 4, 256) + (is_forward(step) ? tokens * 4 : 0), is_forward(step) ? 5 : 2);
}
Work compact_router(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Router); }
Work router_loss(const OpList& list, const Op& op, int step) {
  return memory_bound(list, op, step, Family::Router, is_forward(step) ? list.tensor(op.inputs[0]).rows() * 4 : 0, is_forward(step) ? 3 : 1);
}
Work sort(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::Permute, 0, is_forward(step) ? 2 : 1); }

// Dense form: counts, and where the row map does not hold them the experts of the slots.
Work permute(const OpList& list, const Op& op, int step) {
  const MoeAttr& a = std::get<MoeAttr>(op.attr);
  if (!is_forward(step)) return memory_bound(list, op, step, Family::Permute, 0, 2);
  const Bytes slots = list.tensor(op.inputs[0]).rows() * a.top_k * 4;
  return memory_bound(list, op, step, Family::Permute, round_up(a.experts * 4, 256) + slots, 5);
}

Work score(const OpList& list, const Op& op, int step) {
  const Tensor& x = list.tensor(op.inputs[0]);
  if (is_forward(step)) return memory_bound(list, op, step, Family::Elementwise, 0, op.kind == OpKind::SharedGate ? 2 : 1);
  return memory_bound(list, op, step, Family::Elementwise, round_up(x.rows() * 4, 256) + column_sums_scratch(x.rows(), x.cols()), 4);
}

// ------------------------------------------------------------------------------------------ ends ----

Work embedding(const OpList& list, const Op& op, int step) {
  const std::int64_t tokens = list.tensor(op.inputs[0]).rows();
  Work w{.family = Family::Embedding};
  w.traffic = 2 * list.tensor(op.outputs[0]).bytes();
  if (!is_forward(step)) {
    w.scratch = embedding_backward_scratch(tokens);
    w.traffic *= 3; // fp32 rows of the table, read and written
    w.kernels = 2;
  }
  w.size = static_cast<double>(w.traffic);
  return w;
}

Work cross_entropy(const OpList& list, const Op& op, int step) { return memory_bound(list, op, step, Family::CrossEntropy); }

// A chunk's logits, in whose place their gradient is written.
Work linear_cross_entropy(const OpList& list, const Op& op, int step) {
  const LossAttr& a = std::get<LossAttr>(op.attr);
  const Tensor& x = list.tensor(op.inputs[0]);
  const std::int64_t rows = list.tensor(op.inputs[1]).rows(); // of the gathered input, under sequence parallelism
  const std::int64_t chunk = a.chunk > 0 ? std::min(a.chunk, rows) : rows, chunks = ceil_div(rows, chunk);
  const Bytes logits = chunk * a.vocab * size_of(x.dtype), weight = op.params[0].elements * size_of(op.params[0].dtype);
  const double gemm = 2.0 * static_cast<double>(rows) * static_cast<double>(op.params[0].elements);
  Work w;
  w.family = Family::Gemm;
  w.scratch = kGemmWorkspace + logits + (rows > x.rows() ? round_up(rows * x.cols() * size_of(x.dtype), 256) : 0);
  w.flops = is_forward(step) ? gemm : 3 * gemm;
  w.traffic = chunks * (weight + 2 * logits) * (is_forward(step) ? 1 : 3);
  w.size = w.flops;
  w.kernels = static_cast<int>(chunks) * (is_forward(step) ? 2 : 4);
  return w;
}

const OwnEntry kEntries[] = {
    {OpKind::Data, pass, ""},
    {OpKind::View, view, ""},
    {OpKind::Copy, pass, ""},
    {OpKind::ResidualAdd, pass, ""},
    {OpKind::AllToAll, all_to_all, ""},
    {OpKind::AllGather, gather_columns, ""},
    {OpKind::ReduceScatter, pass, ""},
    {OpKind::AllReduce, pass, ""},
    {OpKind::RmsNorm, rms_norm, ""},
    {OpKind::Linear, linear, ""},
    {OpKind::ConvSilu, conv, ""},
    {OpKind::Conv, conv, ""},
    {OpKind::Silu, pass, ""},
    {OpKind::L2Norm, l2_norm, ""},
    {OpKind::ExpandHeads, pass, ""},
    {OpKind::Gates, gates, ""},
    {OpKind::Rule, rule, ""},
    {OpKind::Gdn2Gates, gdn2_gates, ""},
    {OpKind::Gdn2Rule, gdn2_rule, ""},
    {OpKind::GatedNorm, gated_norm, ""},
    {OpKind::GdnPre, gdn_pre, ""},
    {OpKind::HeadNorm, rms_norm, ""},
    {OpKind::Rope, pass, ""},
    {OpKind::CoreAttention, core_attention, ""},
    {OpKind::OutputGate, pass, ""},
    {OpKind::Router, router, ""},
    {OpKind::Permute, permute, ""},
    {OpKind::Dispatch, moved, ""},
    {OpKind::GroupedLinear, grouped_linear, ""},
    {OpKind::SwiGluProb, pass, ""},
    {OpKind::CombineDispatch, moved, ""},
    {OpKind::Unpermute, moved, ""},
    {OpKind::SwiGlu, pass, ""},
    {OpKind::SharedGate, score, ""},
    {OpKind::Embedding, embedding, ""},
    {OpKind::Concat, pass, ""},
    {OpKind::LmHead, linear, ""},
    {OpKind::CrossEntropy, cross_entropy, ""},
    {OpKind::LinearCrossEntropy, linear_cross_entropy, ""},
    {OpKind::LossSum, pass, ""},
    {OpKind::Gdn2Pre, gdn2_pre, ""},
    {OpKind::AttentionPre, attention_pre, ""},
    {OpKind::TopK, compact_router, ""},
    {OpKind::RouterLoss, router_loss, ""},
    {OpKind::Sort, sort, ""},
    {OpKind::Gather, moved, ""},
    {OpKind::SharedScore, score, ""},
    {OpKind::Toy, nullptr, "it stands for no computation"},
};

class Own final : public Provider {
public:
  std::string_view name() const override { return "own"; }
  Work work(const OpList& list, const Op& op, int step) const override {
    const OwnEntry& entry = own_entry(op.kind);
    if (!entry.work)
      throw Error(ErrorCode::Config, fmt::format("op list '{}', {}: our kernels run no op of kind '{}': {}", list.name, op.name,
                                                 name_of(op.kind), entry.reason));
    return own_work(list, op, step);
  }
  // Gradients are zeroed, read for the norm and read by Adam, which rewrites its states and writes the parameters.
  Bytes update_traffic(const StateBytes& s, std::int64_t, std::int64_t shards) const override {
    return s.gradients + 2 * s.gradients / shards + 2 * s.optimizer + s.parameters / shards;
  }
};

} // namespace

// Efficiencies are measured op kind by op kind; the experts' two products differ in width, and so in what bounds them.
std::string_view rows_of(const Op& op) {
  if (op.kind != OpKind::GroupedLinear) return name_of(op.kind);
  return op.name == "expert_fc2" ? "expert_fc2" : "expert_fc1";
}

GdnShape gdn_shape_of(const OpList& list, const Op& op) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const bool pre = op.kind == OpKind::GdnPre || op.kind == OpKind::Gdn2Pre;
  const std::int64_t key_heads = pre ? a.key_heads : list.tensor(op.inputs[0]).cols() / a.key_dim;
  return {list.tensor(op.inputs[0]).rows(), std::max<std::int64_t>(a.sequences, 1), static_cast<int>(key_heads),
          static_cast<int>(a.value_heads), static_cast<int>(a.key_dim), static_cast<int>(a.value_dim)};
}

const OwnEntry& own_entry(OpKind kind) { return kEntries[static_cast<size_t>(kind)]; }

Work own_work(const OpList& list, const Op& op, int step) {
  Work w = own_entry(op.kind).work(list, op, step);
  if (const Bytes more = ranks_scratch(list, op, step); more > 0) w.scratch = round_up(w.scratch, 256) + more;
  w.op = rows_of(op);
  return w;
}

const Provider& own_provider() {
  static const Own provider;
  return provider;
}

const Provider& provider_of(std::string_view stack) { return stack == "native" ? own_provider() : upstream_provider(); }

} // namespace gdn::kernels
