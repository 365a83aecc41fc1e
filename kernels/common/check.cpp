#include "kernels/common/check.h"

#include <cstdio>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::kernels {

void check_cuda(cudaError_t status, const char* expression, std::source_location where) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(ErrorCode::Cuda,
              fmt::format("{} failed at {}:{}: {} ({})", expression, where.file_name(),
                          where.line(), cudaGetErrorString(status), cudaGetErrorName(status)));
}

void check_launch(const char* kernel, std::source_location where) {
  check_cuda(cudaGetLastError(), kernel, where);
}

void check_cuda_nothrow(cudaError_t status, const char* expression) noexcept {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  std::fprintf(stderr, "%s failed: %s\n", expression, cudaGetErrorString(status));
}

} // namespace gdn::kernels
