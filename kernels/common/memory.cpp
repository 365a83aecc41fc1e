#include "kernels/common/memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "core/error.h"
#include "kernels/common/check.h"

namespace gdn::kernels {

std::byte* allocate(Bytes bytes, std::string_view what) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<std::size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    GDN_CUDA(cudaMemGetInfo(&free, &total));
    throw Error(ErrorCode::DoesNotFit, fmt::format("out of device memory: {} for {}, {} of {} are free", format_bytes(bytes), what,
                                                   format_bytes(static_cast<Bytes>(free)), format_bytes(static_cast<Bytes>(total))));
  }
  GDN_CUDA(status);
  return static_cast<std::byte*>(data);
}

} // namespace gdn::kernels
