#pragma once
#include <cstdint>
#include <string_view>

#include <cuda.h>

#include "core/dtype.h"

namespace gdn::kernels {

// A tensor [tokens, heads, width] whose rows are cut into boxes by the copy engine.
struct TokenTensor {
  std::string_view name; // for messages
  const void* data;      // 16-byte aligned
  std::int64_t tokens, heads, width;
  std::int64_t token_stride; // elements, multiple of 16 bytes
  std::int64_t head_stride;  // elements, multiple of 16 bytes
};

// Boxes of 64 tokens x 1 head x 64 columns of bf16, 128-byte swizzled; columns past `width` and tokens past
// `tokens` read as zero. Throws Error{Usage} naming the tensor and the stride or address that the
// copy engine cannot take. An empty tensor gives a map that must not be used.
CUtensorMap make_tile_map(const TokenTensor& tensor);

// The same for boxes of `rows` tokens x 1 head x 128 bytes of bf16 or fp32.
CUtensorMap make_box_map(const TokenTensor& tensor, int rows, DType dtype);

} // namespace gdn::kernels
