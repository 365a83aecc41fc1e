// Finding a token's request on the device.
#pragma once
#include "kernels/gdn/decode.h"

namespace gdn::kernels {

struct DecodeRequest {
  std::int64_t first, end; // its tokens
  std::int64_t slot;
};

__device__ __forceinline__ DecodeRequest decode_request(const GdnDecodeBatch& batch, std::int64_t request) {
  const std::int64_t slot = batch.slots[request];
  if (batch.cu_tokens == nullptr) return {request, request + 1, slot};
  return {batch.cu_tokens[request], batch.cu_tokens[request + 1], slot};
}

// The request that holds `token`, or -1 behind the last one. Empty requests are passed over.
__device__ __forceinline__ std::int64_t request_of(const GdnDecodeBatch& batch, std::int64_t token) {
  if (batch.cu_tokens == nullptr) return token;
  if (token >= batch.cu_tokens[batch.requests]) return -1;
  std::int64_t low = 0, high = batch.requests; // cu[low] <= token < cu[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (batch.cu_tokens[middle] <= token ? low : high) = middle;
  }
  return low;
}

} // namespace gdn::kernels
