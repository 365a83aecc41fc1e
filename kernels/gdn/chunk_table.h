#pragma once
#include "kernels/gdn/shape.h"

namespace gdn::kernels {

// cu_seqlens -> the work list that the rule's kernels walk. Needs no host copy of the lengths.
struct GdnChunkTableParams {
  const void* cu_seqlens; // [sequences + 1], ascending from 0, at most `tokens`
  bool cu_seqlens_int64;  // else int32
  std::int64_t tokens;
  std::int64_t sequences;
  GdnChunkTable table; // out
};

// Bytes of a chunk table in one buffer, and its three parts inside that buffer (16-byte aligned).
constexpr std::int64_t gdn_chunk_table_bytes(std::int64_t tokens, std::int64_t sequences) {
  return gdn_chunk_capacity(tokens, sequences) * std::int64_t{sizeof(GdnChunk)} +
         (2 * sequences + 2) * std::int64_t{sizeof(std::int32_t)};
}
inline GdnChunkTable gdn_chunk_table_at(void* buffer, std::int64_t tokens, std::int64_t sequences) {
  auto* chunks = static_cast<GdnChunk*>(buffer);
  auto* offsets = reinterpret_cast<std::int32_t*>(chunks + gdn_chunk_capacity(tokens, sequences));
  return {chunks, offsets, offsets + sequences + 2};
}

void gdn_chunk_table(const GdnChunkTableParams& params, const LaunchContext& context);

} // namespace gdn::kernels
