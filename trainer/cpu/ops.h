#pragma once
#include <string_view>

#include "core/error.h"
#include "reference/view.h"
#include "trainer/op_call.h"

// The CPU functions of every op kind: each maps the operands of a call to functions of src/reference.
namespace gdn::trainer::cpu {

struct OpFunctions {
  void (*forward)(const OpCall&) = nullptr;
  void (*backward)(const OpCall&) = nullptr; // every step; tells them apart by name
  // Scratch of the forward (step -1) or of a step, bytes; absent: none.
  Bytes (*scratch)(const model::OpList&, const model::Op&, int step) = nullptr;
  std::string_view reason = {};              // why the kind cannot run here; empty: it can
};
// The table, indexed by kind.
const OpFunctions& functions_of(model::OpKind kind);

// One family a file.
struct Entry {
  model::OpKind kind;
  OpFunctions functions;
};
std::span<const Entry> plumbing_ops();
std::span<const Entry> linear_ops();
std::span<const Entry> exchange_ops();
std::span<const Entry> gdn_ops();
std::span<const Entry> fused_ops();
std::span<const Entry> gdn2_ops();
std::span<const Entry> attention_ops();
std::span<const Entry> moe_ops();
std::span<const Entry> routing_ops();
std::span<const Entry> ends_ops();

// The op Rule on operands in double, in the arithmetic of a sound bf16 kernel (reference/rule_rounded.h).
OpFunctions rounded_rule();

// ----------------------------------------------------------------- operands as reference views ----

using reference::Acc;
using reference::bf16;
using reference::Mat;
using reference::Write;

template <class T> Mat<T> mat(const View& v) {
  if (!v) return {};
  if (v.dtype != reference::dtype_of<T>())
    throw Error(ErrorCode::Internal, "an operand has dtype " + std::string(name_of(v.dtype)) + ", expected " +
                                         std::string(name_of(reference::dtype_of<T>())));
  return Mat<T>(reinterpret_cast<T*>(v.data), v.rows, v.cols, v.stride);
}
template <class T> reference::Grad<T> grad(const GradView& g) {
  return {mat<T>(g.to), g.accumulate ? Write::Accumulate : Write::Overwrite};
}
inline reference::Values values(const View& v) {
  return v ? reference::Values(v.data, v.dtype, v.rows, v.cols, v.stride) : reference::Values();
}
inline reference::ValuesGrad values_grad(const GradView& g) {
  reference::ValuesGrad out;
  out.to = values(g.to);
  out.write = g.accumulate ? Write::Accumulate : Write::Overwrite;
  return out;
}

// What an op adds up in, and keeps statistics and parameter gradients in, where its tensors are `storage`.
inline DType accumulator(DType storage) { return storage == DType::FP64 ? DType::FP64 : DType::FP32; }

// Calls f<T>() for the storage type of a tensor.
template <class F> void with_type(DType dtype, F&& f) {
  if (dtype == DType::BF16) f.template operator()<bf16>();
  else if (dtype == DType::FP32) f.template operator()<float>();
  else if (dtype == DType::FP64) f.template operator()<double>(); // wide.h
  else throw Error(ErrorCode::Internal, "the CPU has no functions for tensors in " + std::string(name_of(dtype)));
}

} // namespace gdn::trainer::cpu
