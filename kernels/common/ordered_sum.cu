#include "kernels/common/check.h"
#include "kernels/common/ordered_sum.h"
#include "kernels/common/row_vector.cuh"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

template <class T> struct Wide {
  using Type = T;
  __device__ static T load(T x) { return x; }
  __device__ static T store(T x) { return x; }
};
template <> struct Wide<Bf16> {
  using Type = float;
  __device__ static float load(Bf16 x) { return RowVector<4>::widen(x.bits); }
  __device__ static Bf16 store(float x) { return {RowVector<4>::narrow(x)}; }
};

// A thread's elements at a time: 16 bytes where everything is aligned to them, else one.
template <class T, int kWidth> struct alignas(kWidth * sizeof(T)) Pack { T x[kWidth]; };

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) reduce_in_order_kernel(OrderedParts parts, bool maximum, T* out) {
  using P = Pack<T, kWidth>;
  const std::int64_t packs = parts.elements / kWidth, stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < packs; i += stride) {
    typename Wide<T>::Type sum[kWidth];
    for (int r = 0; r < parts.ranks; ++r) {
      const P part = static_cast<const P*>(r == parts.own_rank ? parts.own : parts.data)[r == parts.own_rank ? i : r * packs + i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const auto x = Wide<T>::load(part.x[k]);
        sum[k] = r == 0 ? x : maximum ? (x > sum[k] ? x : sum[k]) : sum[k] + x;
      }
    }
    P result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) result.x[k] = Wide<T>::store(sum[k]);
    reinterpret_cast<P*>(out)[i] = result;
  }
}

template <class T, int kWidth>
void launch_with(const OrderedParts& parts, bool maximum, void* out, const LaunchContext& context) {
  const std::int64_t ctas = (parts.elements / kWidth + kThreads - 1) / kThreads, most = std::int64_t{context.sm_count} * 8;
  reduce_in_order_kernel<T, kWidth><<<static_cast<unsigned>(ctas < most ? ctas : most), kThreads, 0, context.stream>>>(parts, maximum, static_cast<T*>(out));
  check_launch("reduce_in_order_kernel");
}

template <class T>
void launch(const OrderedParts& parts, bool maximum, void* out, const LaunchContext& context) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if (parts.elements % kWidth == 0 && aligned(parts.data) && aligned(parts.own) && aligned(out)) launch_with<T, kWidth>(parts, maximum, out, context);
  else launch_with<T, 1>(parts, maximum, out, context);
}

} // namespace

void reduce_in_order(const OrderedParts& parts, DType dtype, bool maximum, void* out, const LaunchContext& context) {
  if (parts.elements == 0) return;
  switch (dtype) {
  case DType::BF16: return launch<Bf16>(parts, maximum, out, context);
  case DType::FP32: return launch<float>(parts, maximum, out, context);
  case DType::FP64: return launch<double>(parts, maximum, out, context);
  case DType::Int32: return launch<std::int32_t>(parts, maximum, out, context);
  case DType::Int64: return launch<std::int64_t>(parts, maximum, out, context);
  default: refuse("reduce_in_order", {{"type", static_cast<int>(dtype)}, {"ranks", parts.ranks}}, "bf16, fp32, fp64, int32, int64");
  }
}

} // namespace gdn::kernels
