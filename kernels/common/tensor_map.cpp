#include "kernels/common/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "core/error.h"
#include "kernels/common/check.h"

namespace gdn::kernels {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    GDN_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                              cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || address == nullptr)
      throw Error(ErrorCode::Cuda, "the driver has no cuTensorMapEncodeTiled",
                  "install a driver for CUDA 12 or later");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(address);
  }();
  return function;
}

void require(bool ok, const TokenTensor& t, std::string_view what, std::int64_t value) {
  if (!ok)
    throw Error(ErrorCode::Usage,
                fmt::format("{}: {} {} is not supported: address and strides must be multiples of "
                            "16 bytes",
                            t.name, what, value));
}

} // namespace

CUtensorMap make_tile_map(const TokenTensor& t) { return make_box_map(t, 64, DType::BF16); }

CUtensorMap make_box_map(const TokenTensor& t, int rows, DType dtype) {
  CUtensorMap map{};
  if (t.tokens == 0) return map;
  require(reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0, t, "address",
          static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.data)));
  const std::int64_t element = size_of(dtype);
  require(t.token_stride * element % 16 == 0 && t.token_stride > 0, t, "token stride", t.token_stride);
  require(t.head_stride * element % 16 == 0 && t.head_stride > 0, t, "head stride", t.head_stride);
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(t.width), static_cast<cuuint64_t>(t.heads),
                                 static_cast<cuuint64_t>(t.tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(t.head_stride * element),
                                 static_cast<cuuint64_t>(t.token_stride * element)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / element), 1, static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encoder()(&map, dtype == DType::FP32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(t.data), extents,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(
        ErrorCode::Cuda,
        fmt::format("{}: the driver refused a tensor map of {} tokens x {} heads x {}, strides "
                    "{} and {} (error {})",
                    t.name, t.tokens, t.heads, t.width, t.token_stride, t.head_stride,
                    static_cast<int>(status)));
  return map;
}

} // namespace gdn::kernels
