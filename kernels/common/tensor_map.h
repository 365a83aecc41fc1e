#pragma once
#include <cstdint>
#include <string_view>

#include <cuda.h>

namespace gdn::kernels {

// A bf16 tensor [tokens, heads, width] whose rows are cut into 64 x 64 tiles by the copy engine.
struct TokenTensor {
  std::string_view name; // for messages
  const void* data;      // 16-byte aligned
  std::int64_t tokens, heads, width;
  std::int64_t token_stride; // elements, multiple of 8
  std::int64_t head_stride;  // elements, multiple of 8
};

// Boxes of 64 tokens x 1 head x 64 columns, 128-byte swizzled; columns past `width` and tokens past
// `tokens` read as zero. Throws Error{Usage} naming the tensor and the stride or address that the
// copy engine cannot take. An empty tensor gives a map that must not be used.
CUtensorMap make_tile_map(const TokenTensor& tensor);

} // namespace gdn::kernels
