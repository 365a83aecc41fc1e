#include "kernels/common/check.h"

#include <cstdio>

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/common/launch.h"

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

void refuse(const char* kernel, std::initializer_list<std::pair<const char*, std::int64_t>> sizes,
            const char* supported) {
  std::string list;
  for (const auto& [name, size] : sizes)
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", name, size);
  throw Error(ErrorCode::Usage, fmt::format("{}: {} is not supported: {}", kernel, list, supported));
}

void require_scratch(const LaunchContext& context, std::int64_t bytes, const char* kernel) {
  if (context.scratch_bytes < bytes)
    throw Error(ErrorCode::Internal,
                fmt::format("{}: {} bytes of scratch given, {} needed", kernel, context.scratch_bytes, bytes));
}

void check_cuda_nothrow(cudaError_t status, const char* expression) noexcept {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  std::fprintf(stderr, "%s failed: %s\n", expression, cudaGetErrorString(status));
}

} // namespace gdn::kernels
