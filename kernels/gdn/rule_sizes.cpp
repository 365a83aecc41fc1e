// Sizes of the rule's intermediates; host only, so the planner can ask without a device.
#include "kernels/gdn/rule_sizes.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/gdn/chunk_backward.h"

namespace gdn::kernels {

RuleScratch rule_scratch(const GdnShape& shape, bool backward) {
  const std::int64_t chunk_heads =
      gdn_chunk_capacity(shape.tokens, shape.sequences) * shape.value_heads;
  const std::int64_t slices = (shape.value_dim + 63) / 64;
  RuleScratch s;
  std::int64_t end = 0;
  auto place = [&](std::int64_t bytes_per_chunk_head) {
    const std::int64_t at = end;
    end = (at + chunk_heads * bytes_per_chunk_head + 1023) / 1024 * 1024;
    return at;
  };
  if (is_wide(shape)) {
    if (!backward) return s;
    const std::int64_t token_heads = shape.tokens * shape.value_heads;
    auto place_bytes = [&](std::int64_t bytes) {
      const std::int64_t at = end;
      end = (at + bytes + 1023) / 1024 * 1024;
      return at;
    };
    s.checkpoints = place(std::int64_t{kChunk / kWideBlock} * shape.key_dim * shape.value_dim * 4);
    s.wide_z = place_bytes(token_heads * shape.value_dim * 4);
    s.parts =
        place_bytes(token_heads * ((shape.value_dim + 31) / 32) * (2 * kMaxWideKeyDim + 2) * 4);
    s.bytes = end;
    return s;
  }
  s.p = place(kTileImageBytes);
  s.factors = place(kRowFactors * kChunk * 4);
  if (backward) {
    s.states = place(slices * 2 * kTileImageBytes);
    s.d_states = place(slices * 2 * kTileImageBytes);
    s.z = place(slices * kTileImageBytes);
    s.e = place(slices * kTileImageBytes);
  }
  s.bytes = end;
  return s;
}

namespace {

void check_shape(const GdnShape& s, std::string_view kernel, int max_key_dim, int max_value_dim) {
  auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::Usage,
                fmt::format("{}: {} tokens, {} sequences, heads {}/{}, widths {}/{} are not "
                            "supported: {}",
                            kernel, s.tokens, s.sequences, s.key_heads, s.value_heads, s.key_dim,
                            s.value_dim, what));
  };
  constexpr auto kLimit = std::int64_t{1} << 31;
  if (s.tokens < 0 || s.tokens >= kLimit) refuse("tokens must be below 2^31");
  if (s.sequences < 0 || s.sequences >= kLimit) refuse("sequences must be below 2^31");
  if (s.key_heads <= 0 || s.value_heads <= 0 || s.value_heads % s.key_heads != 0)
    refuse("value heads must be a multiple of key heads");
  if (s.key_dim <= 0 || s.value_dim <= 0 || s.key_dim % 8 != 0 || s.value_dim % 8 != 0)
    refuse("widths must be multiples of 8");
  if (s.key_dim > max_key_dim || s.value_dim > max_value_dim)
    refuse(fmt::format("key width up to {}, value width up to {}", max_key_dim, max_value_dim));
}

} // namespace

void check_rule_shape(const GdnShape& shape, std::string_view kernel) {
  check_shape(shape, kernel, kMaxWideKeyDim, kMaxWideValueDim);
}

void check_front_end_shape(const GdnShape& shape, std::string_view kernel) {
  check_shape(shape, kernel, 256, 256);
}

void check_gated_norm(const GatedNormInputs& in, std::string_view kernel) {
  if (in.tokens < 0 || in.heads <= 0 || in.width <= 0 || in.width > 256 || in.width % 8 != 0)
    throw Error(ErrorCode::Usage,
                fmt::format("{}: {} tokens x {} heads x {} is not supported: widths "
                            "are multiples of 8 up to 256",
                            kernel, in.tokens, in.heads, in.width));
}

void check_scratch(const LaunchContext& context, std::int64_t bytes, std::string_view kernel) {
  if (context.scratch_bytes < bytes)
    throw Error(ErrorCode::Internal, fmt::format("{}: {} bytes of scratch given, {} needed", kernel,
                                                 context.scratch_bytes, bytes));
}

std::int64_t gdn_chunk_forward_scratch(const GdnShape& shape) {
  return rule_scratch(shape, false).bytes;
}

std::int64_t gdn_chunk_backward_scratch(const GdnShape& shape) {
  return rule_scratch(shape, true).bytes;
}

} // namespace gdn::kernels
