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

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_in_order_kernel(const T* parts, int ranks, std::int64_t elements, bool maximum, T* out) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < elements; i += stride) {
    typename Wide<T>::Type sum = Wide<T>::load(parts[i]);
    for (int r = 1; r < ranks; ++r) {
      const auto x = Wide<T>::load(parts[r * elements + i]);
      sum = maximum ? (x > sum ? x : sum) : sum + x;
    }
    out[i] = Wide<T>::store(sum);
  }
}

template <class T>
void launch(const void* parts, int ranks, std::int64_t elements, bool maximum, void* out, const LaunchContext& context) {
  const std::int64_t ctas = (elements + kThreads - 1) / kThreads, most = std::int64_t{context.sm_count} * 8;
  reduce_in_order_kernel<<<static_cast<unsigned>(ctas < most ? ctas : most), kThreads, 0, context.stream>>>(
      static_cast<const T*>(parts), ranks, elements, maximum, static_cast<T*>(out));
  check_launch("reduce_in_order_kernel");
}

} // namespace

void reduce_in_order(const void* parts, int ranks, std::int64_t elements, DType dtype, bool maximum, void* out, const LaunchContext& context) {
  if (elements == 0) return;
  switch (dtype) {
  case DType::BF16: return launch<Bf16>(parts, ranks, elements, maximum, out, context);
  case DType::FP32: return launch<float>(parts, ranks, elements, maximum, out, context);
  case DType::FP64: return launch<double>(parts, ranks, elements, maximum, out, context);
  case DType::Int32: return launch<std::int32_t>(parts, ranks, elements, maximum, out, context);
  case DType::Int64: return launch<std::int64_t>(parts, ranks, elements, maximum, out, context);
  default: refuse("reduce_in_order", {{"type", static_cast<int>(dtype)}, {"ranks", ranks}}, "bf16, fp32, fp64, int32, int64");
  }
}

} // namespace gdn::kernels
