#include "kernels/common/fingerprint.h"

#include <algorithm>

#include "kernels/common/check.h"

namespace gdn::kernels {
namespace {

using Sum = unsigned long long; // what atomicAdd takes: integers add up to the same in any order

__device__ std::uint64_t warp_sum(std::uint64_t x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, static_cast<Sum>(x), offset);
  return x;
}

__global__ void __launch_bounds__(256) fingerprint_kernel(const std::uint32_t* data, std::int64_t words, Fingerprint* out) {
  Fingerprint sum;
  const std::int64_t step = std::int64_t{gridDim.x} * 256;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < words; i += step) sum.add(data[i], static_cast<std::uint64_t>(i));
  const std::uint64_t low = warp_sum(sum.low), high = warp_sum(sum.high);
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<Sum*>(&out->low), static_cast<Sum>(low));
  atomicAdd(reinterpret_cast<Sum*>(&out->high), static_cast<Sum>(high));
}

__global__ void __launch_bounds__(256) find_other_kernel(const unsigned char* data, std::int64_t bytes, unsigned char value, std::int32_t* other) {
  const std::int64_t step = std::int64_t{gridDim.x} * 256;
  bool found = false;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < bytes; i += step) found |= data[i] != value;
  if (found) *other = 1;
}

unsigned blocks(std::int64_t items, const LaunchContext& context) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + 255) / 256, 1, std::int64_t{8} * context.sm_count));
}

} // namespace

void fingerprint(const void* data, std::int64_t words, Fingerprint* out, const LaunchContext& context) {
  GDN_CUDA(cudaMemsetAsync(out, 0, sizeof(Fingerprint), context.stream));
  fingerprint_kernel<<<blocks(words, context), 256, 0, context.stream>>>(static_cast<const std::uint32_t*>(data), words, out);
  check_launch("fingerprint_kernel");
}

void find_other(const void* data, std::int64_t bytes, unsigned char value, std::int32_t* other, const LaunchContext& context) {
  GDN_CUDA(cudaMemsetAsync(other, 0, sizeof *other, context.stream));
  find_other_kernel<<<blocks(bytes, context), 256, 0, context.stream>>>(static_cast<const unsigned char*>(data), bytes, value, other);
  check_launch("find_other_kernel");
}

} // namespace gdn::kernels
