#pragma once
#include <cstdint>

#include "kernels/common/launch.h"

namespace gdn::kernels {

inline constexpr int kChunk = 64; // tokens of a chunk

// Sizes of one call of the gated delta rule. Sequences are packed along the token axis; a batch of
// B sequences of T tokens is `sequences` = B, cu_seqlens = 0, T, 2T, ...
struct GdnShape {
  std::int64_t tokens = 0;    // rows of every token tensor, at least cu_seqlens[sequences]; < 2^31
  std::int64_t sequences = 0; // may include empty ones
  int key_heads = 0;          // q, k, dq, dk
  int value_heads = 0;        // v, g, beta, o, states; a multiple of key_heads
  int key_dim = 0;            // multiple of 8
  int value_dim = 0;          // multiple of 8
};

// Rows of the chunk table: every sequence starts a chunk of its own, and rows past the last
// sequence are cut into 64-row pieces that only get zeros written.
constexpr std::int64_t gdn_chunk_capacity(std::int64_t tokens, std::int64_t sequences) {
  return tokens / kChunk + sequences + 1;
}

// A row of the chunk table.
struct GdnChunk {
  enum Kind : std::int32_t { kUnused = 0, kTokens = 1, kPadding = 2 };
  std::int32_t sequence; // kTokens only
  std::int32_t first_token;
  std::int32_t rows; // 1..64
  std::int32_t kind;
};

// Work list of one packing, in device memory, made by gdn_chunk_table and shared by all layers.
struct GdnChunkTable {
  GdnChunk* chunks;      // [gdn_chunk_capacity]: chunks of sequence 0, 1, ..., padding, unused
  std::int32_t* offsets; // [sequences + 2]: first chunk of each sequence, first padding piece,
                         // end of the padding pieces
  std::int32_t* order;   // [sequences]: sequences by descending length, ties by index
};

} // namespace gdn::kernels
