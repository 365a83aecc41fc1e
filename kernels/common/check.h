#pragma once
#include <source_location>

// cudaError_t without including the CUDA headers everywhere.
#include <cuda_runtime_api.h>

namespace gdn::kernels {

// Throws Error{Cuda} with the expression, the place and CUDA's own words; clears a non-sticky
// error.
void check_cuda(cudaError_t status, const char* expression,
                std::source_location where = std::source_location::current());

// Throws Error{Cuda} if the launch just made was refused (too much shared memory, empty grid, ...).
void check_launch(const char* kernel, std::source_location where = std::source_location::current());

// For destructors: prints to stderr instead of throwing.
void check_cuda_nothrow(cudaError_t status, const char* expression) noexcept;

} // namespace gdn::kernels

#define GDN_CUDA(expression) ::gdn::kernels::check_cuda((expression), #expression)
#define GDN_CUDA_NOTHROW(expression) ::gdn::kernels::check_cuda_nothrow((expression), #expression)
