#pragma once
#include <string_view>

#include "core/error.h"
#include "kernels/common/matrix.h"
#include "trainer/cuda/engine.h"

// The CUDA functions of every op kind: each maps the operands of a call to launchers of kernels/.
namespace gdn::trainer::cuda {

struct OpFunctions {
  void (*forward)(const OpCall&, Engine&) = nullptr;
  void (*backward)(const OpCall&, Engine&) = nullptr; // every step; tells them apart by what it writes
};
// The table, indexed by kind; why a kind has none: kernels/describe.
const OpFunctions& functions_of(model::OpKind kind);

// One family a file.
struct Entry {
  model::OpKind kind;
  OpFunctions functions;
};
std::span<const Entry> plumbing_ops();
std::span<const Entry> linear_ops();
std::span<const Entry> gdn_ops();
std::span<const Entry> gdn2_ops();
std::span<const Entry> attention_ops();
std::span<const Entry> moe_ops();
std::span<const Entry> routing_ops();
std::span<const Entry> ends_ops();
std::span<const Entry> exchange_ops();

// ------------------------------------------------------------------- operands as kernels take them ----

using kernels::Gradient;
using kernels::LaunchContext;
using kernels::Matrix;

inline Matrix matrix(const View& v) { return {v.data, v.dtype, v.rows, v.cols, v.stride}; }
inline Gradient gradient(const GradView& g) { return {matrix(g.to), g.accumulate}; }

[[noreturn]] void refuse_dtype(DType found, DType expected);

// The elements, for kernels of one dtype; absent: null. Throws Error{Config} for an operand in another one.
template <class T> T* data(const View& v) {
  constexpr DType kType = std::is_same_v<T, kernels::Bf16> ? DType::BF16 : std::is_same_v<T, float> ? DType::FP32 : DType::Int32;
  if (v && v.dtype != kType) refuse_dtype(v.dtype, kType);
  return reinterpret_cast<T*>(v.data);
}
// For kernels that only write: throws Error{Internal} when the op list asks for a sum.
const GradView& only_written(const OpCall& c, const GradView& g);
// For kernels that take contiguous rows: throws Error{Internal} otherwise.
const View& contiguous(const OpCall& c, const View& v);

} // namespace gdn::trainer::cuda
