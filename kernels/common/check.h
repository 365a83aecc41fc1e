#pragma once
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <utility>

// cudaError_t without including the CUDA headers everywhere.
#include <cuda_runtime_api.h>

namespace gdn::kernels {

// Throws Error{Cuda} with the expression, the place and CUDA's own words; clears a non-sticky
// error.
void check_cuda(cudaError_t status, const char* expression,
                std::source_location where = std::source_location::current());

// Throws Error{Cuda} if the launch just made was refused (too much shared memory, empty grid, ...).
void check_launch(const char* kernel, std::source_location where = std::source_location::current());

// Throws Error{Usage}: "kernel: experts 3, rows 7 are not supported: <what is>". For .cu files, whose compiler
// cannot check fmt's format strings.
[[noreturn]] void refuse(const char* kernel, std::initializer_list<std::pair<const char*, std::int64_t>> sizes,
                         const char* supported);
// Throws Error{Internal} if the context carries less scratch than `bytes`.
struct LaunchContext;
void require_scratch(const LaunchContext& context, std::int64_t bytes, const char* kernel);

// For destructors: prints to stderr instead of throwing.
void check_cuda_nothrow(cudaError_t status, const char* expression) noexcept;

} // namespace gdn::kernels

#define GDN_CUDA(expression) ::gdn::kernels::check_cuda((expression), #expression)
#define GDN_CUDA_NOTHROW(expression) ::gdn::kernels::check_cuda_nothrow((expression), #expression)
