#pragma once
#include <cstdint>
#include <string_view>

#include "kernels/gdn/gated_norm.h"
#include "kernels/gdn/shape.h"

namespace gdn::kernels {

inline constexpr int kTileImageBytes = 8192; // a 64 x 64 bf16 tile
inline constexpr int kRowFactors = 9;        // fp32 factors per row, value head
inline constexpr int kMaxKeyDim = 128;       // of the tensor-core kernels
inline constexpr int kMaxValueDim = 192;
inline constexpr int kMaxWideKeyDim = 256; // of the fp32 recurrence
inline constexpr int kMaxWideValueDim = 512;
inline constexpr int kWideBlock = 16; // tokens between its checkpoints

// True if the fp32 recurrence runs instead of the tensor-core kernels: by widths only.
constexpr bool is_wide(const GdnShape& s) {
  return s.key_dim > kMaxKeyDim || s.value_dim > kMaxValueDim;
}

// Byte offsets of the intermediates inside the scratch buffer. Per chunk and value head: P, the row
// factors, and in the backward S and dS (64 x 128 bf16 per 64 value columns), Z and E (64 x 64).
// The fp32 recurrence has buffers of its own, in its backward.
struct RuleScratch {
  std::int64_t checkpoints = 0, wide_z = 0, parts = 0;
  std::int64_t p = 0, factors = 0, states = 0, d_states = 0, z = 0, e = 0, bytes = 0;
};
RuleScratch rule_scratch(const GdnShape& shape, bool backward);

// Throw Error{Usage} naming the shape and the limit it breaks: of the rule, the front end, the
// norm.
void check_rule_shape(const GdnShape& shape, std::string_view kernel);
void check_front_end_shape(const GdnShape& shape, std::string_view kernel);
void check_gated_norm(const GatedNormInputs& in, std::string_view kernel);
// Throws Error{Internal} if the context carries less scratch than `bytes`.
void check_scratch(const LaunchContext& context, std::int64_t bytes, std::string_view kernel);

} // namespace gdn::kernels
