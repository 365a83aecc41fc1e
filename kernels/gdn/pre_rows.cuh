// What the front end's two directions share: which rows of which head a warp works on.
#pragma once
#include "kernels/common/row_vector.cuh"
#include "kernels/gdn/gdn_pre.h"

namespace gdn::kernels {

inline constexpr int kPreWarps = 4; // a warp walks the rows of one (chunk, head)
inline constexpr int kPreThreads = 32 * kPreWarps;
inline constexpr int kPreBlock = 4; // rows loaded ahead

// One head of q, k or v, or the gates (the unit after the last head).
struct PreUnit {
  enum Kind { kQuery, kKey, kValue, kGates } kind;
  int head, heads, width;
  std::int64_t channel; // first channel of the head
  __device__ PreUnit(const GdnShape& s, int unit) {
    const int hk = s.key_heads, hv = s.value_heads;
    kind = unit < hk ? kQuery : unit < 2 * hk ? kKey : unit < 2 * hk + hv ? kValue : kGates;
    head = kind == kQuery ? unit : kind == kKey ? unit - hk : unit - 2 * hk;
    heads = kind == kValue ? hv : hk;
    width = kind == kValue ? s.value_dim : s.key_dim;
    channel = kind == kValue ? 2 * std::int64_t{hk} * s.key_dim + std::int64_t{head} * width
                             : std::int64_t{unit} * s.key_dim;
  }
};

// Rows around a chunk that belong to its sequence.
struct PreChunk {
  GdnChunk chunk;
  bool first; // nothing before it
  int limit;  // rows from its first token to the end of the sequence, at most 128; 0 if unused
  __device__ PreChunk(const GdnChunkTable& table, std::int64_t index) {
    chunk = table.chunks[index];
    first = true; // of padding and unused entries too
    limit = chunk.rows;
    if (chunk.kind != GdnChunk::kTokens) return;
    first = table.offsets[chunk.sequence] == index;
    if (index + 1 < table.offsets[chunk.sequence + 1]) limit += table.chunks[index + 1].rows;
  }
};

// Taps and bias of the thread's channels.
template <int kValues>
struct PreTaps {
  float w[kValues][4], bias[kValues];
  __device__ PreTaps(const GdnPreInputs& in, std::int64_t channel, bool active) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int tap = 0; tap < 4; ++tap)
        w[i][tap] =
            active ? RowVector<4>::widen(in.conv_weight[(channel + i) * 4 + tap].bits) : 0.0f;
      bias[i] = active && in.conv_bias != nullptr
                    ? RowVector<4>::widen(in.conv_bias[channel + i].bits)
                    : 0.0f;
    }
  }
};

} // namespace gdn::kernels
