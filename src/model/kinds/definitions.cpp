#include "model/kinds/definitions.h"

#include <algorithm>
#include <array>

#include <fmt/core.h>

#include "core/error.h"
#include "model/builder.h"
#include "model/kinds/attention.h"
#include "model/kinds/gdn.h"
#include "model/kinds/gdn2.h"
#include "model/kinds/plumbing.h"

namespace gdn::model {

namespace {

constexpr GradientStorage kSlice = GradientStorage::Slice;

struct HeadOutputs {
  TensorId q, k, v;
};

// Convolution, L2 norm, heads side by side.
HeadOutputs gdn_heads(Builder& b, TensorId qkv, const Op& op, const GdnAttr& a) {
  const std::int64_t R = b.at(qkv).rows(), hk = a.key_heads, hv = a.value_heads;
  TensorId conv = conv_silu(b, "conv1d", qkv, op.params[0], a, "conv");                   // [R, C]
  TensorId qk = b.view("qk", conv, 0, {R, 2 * hk, a.key_dim}, kSlice);
  TensorId v = b.view("v_columns", conv, 2 * hk * a.key_dim, {R, hv, a.value_dim}, kSlice);
  if (a.normalise) qk = l2_norm(b, "l2norm", qk, a, "qk_hat").y;
  TensorId q = b.view("q_columns", qk, 0, {R, hk, a.key_dim}, kSlice);
  TensorId k = b.view("k_columns", qk, hk * a.key_dim, {R, hk, a.key_dim}, kSlice);
  return {copy(b, "copy_q", q, "q"), copy(b, "copy_k", k, "k"), copy(b, "copy_v", v, "v")};
}

std::vector<TensorId> gdn_pre_of(Builder& b, const std::vector<TensorId>& in, const Op& op) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  HeadOutputs h = gdn_heads(b, in[0], op, a);
  GateOutputs gate = gates(b, "gates", in[1], in[2], op.params[1], op.params[2], a, DType::FP32);
  return {h.q, h.k, h.v, gate.g, gate.beta};
}

std::vector<TensorId> gdn2_pre_of(Builder& b, const std::vector<TensorId>& in, const Op& op) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  HeadOutputs h = gdn_heads(b, in[0], op, a);
  Gdn2GateOutputs gate = gdn2_gates(b, "gates", in[1], in[2], in[3], op.params[1], op.params[2], a);
  return {h.q, h.k, h.v, gate.g, gate.b, gate.w};
}

std::vector<TensorId> attention_pre_of(Builder& b, const std::vector<TensorId>& in, const Op& op) {
  const AttentionAttr& a = std::get<AttentionAttr>(op.attr);
  const std::int64_t R = b.at(in[1]).rows() / a.kv_heads;
  auto prepare = [&](const char* name, TensorId x, std::int64_t heads, size_t gain) {
    const std::string n = name;
    TensorId y = copy(b, "copy_" + n, x, n + "_heads", {R, heads, a.head_dim});
    if (a.qk_norm != QkNorm::None) {
      const NormAttr norm{a.eps, a.zero_centred, (a.qk_norm == QkNorm::WholeVector ? heads : 1) * a.head_dim};
      y = head_norm(b, n + "_norm", y, op.params[gain], norm, {R, heads, a.head_dim}, n + "_normed");
    }
    return a.rotary_dim > 0 ? rope(b, "rope_" + n, y, a, n) : y;
  };
  return {prepare("q", in[0], a.heads, 0), prepare("k", in[1], a.kv_heads, 1),
          copy(b, "copy_v", in[2], "v", {R, a.kv_heads, a.head_dim})};
}

struct Entry {
  OpKind kind;
  std::vector<TensorId> (*write)(Builder& b, const std::vector<TensorId>& inputs, const Op& op);
};
constexpr std::array kEntries{Entry{OpKind::GdnPre, gdn_pre_of}, Entry{OpKind::Gdn2Pre, gdn2_pre_of},
                              Entry{OpKind::AttentionPre, attention_pre_of}};

const Entry* find(OpKind kind) {
  auto it = std::find_if(kEntries.begin(), kEntries.end(), [&](const Entry& e) { return e.kind == kind; });
  return it == kEntries.end() ? nullptr : &*it;
}

// One tensor as the fused op sees it, in a storage just large enough.
TensorId bring_in(Builder& b, const std::string& name, const Tensor& original) {
  TensorId t = b.tensor(name, original.dtype, original.shape);
  Tensor& mine = b.list().tensors.back();
  mine.row_stride = original.row_stride;
  mine.differentiable = original.differentiable;
  b.list().storages.back().bytes = ((mine.rows() - 1) * mine.row_stride + mine.cols()) * size_of(mine.dtype);
  return t;
}

} // namespace

bool is_fused(OpKind kind) { return find(kind) != nullptr; }

Definition definition(const OpList& list, const Op& op) {
  const Entry* entry = find(op.kind);
  if (!entry)
    throw Error(ErrorCode::Internal, fmt::format("op list '{}', {}: kind '{}' is not fused and has no definition", list.name,
                                                 op.name, name_of(op.kind)));
  Builder b(list.name + "." + op.name);
  Definition d;
  for (size_t i = 0; i < op.inputs.size(); ++i) d.inputs.push_back(bring_in(b, fmt::format("in{}", i), list.tensor(op.inputs[i])));
  b.op("inputs", OpKind::Data, {}, d.inputs);
  d.outputs = entry->write(b, d.inputs, op);
  d.list = b.finish(-1, list.tokens);
  return d;
}

} // namespace gdn::model
