// Internal: the kernels behind gdn_chunk_forward and gdn_chunk_backward, as host functions.
// Included by .cu files only.
#pragma once
#include <cuda.h>

#include "kernels/gdn/chunk_forward.h"

namespace gdn::kernels {

// Everything the kernels agree on. Images are swizzled 64x64 tiles in the order shared memory
// wants.
struct RuleArgs {
  CUtensorMap q, k, v, d_o, n; // [tokens, heads, width]; n is the saved 64-wide matrix
  const GdnChunk* chunks;
  const std::int32_t* offsets; // [sequences + 2]
  const std::int32_t* order;
  std::int64_t tokens, sequences;
  std::int64_t capacity;             // rows of the chunk table
  int key_heads, value_heads, group; // group = value_heads / key_heads
  int key_dim, value_dim, value_tiles;
  float scale;
  bool l2_norm;
  float l2_epsilon;

  const float* g;     // [tokens, value_heads]; or
  const float* gamma; // its prefix sums inside each chunk, when not null
  const float* beta;  // [tokens, value_heads]
  float* factors;     // [capacity, value_heads, kFactors, 64]
  char* p;            // images [capacity, value_heads]
  char* states;       // images [capacity, value_heads, value_tiles, 2]
  char* z;            // images [capacity, value_heads, value_tiles]
  char* d_states;     // as states
  char* e;            // as z

  // prepare
  bool scale_p_by_beta; // columns of P: the forward scan multiplies P with Z instead of U
  Bf16* n_out;          // [tokens, value_heads, 64] or null
  float* gamma_out;     // [tokens, value_heads] or null
  float* q_rstd;        // [tokens, key_heads] or null
  float* k_rstd;
  // scans
  Bf16* o;               // [tokens, value_heads, value_dim]
  const float* state_in; // initial state, or gradient of the final state; may be null
  float* state_out;      // final state, or gradient of the initial state; may be null
  const std::int32_t* state_slots; // [sequences], where in both (forward); null: by sequence
  // gradients
  Bf16 *dq, *dk;     // [tokens, key_heads, key_dim]
  Bf16* dv;          // [tokens, value_heads, value_dim]
  float *dg, *dbeta; // [tokens, value_heads]

  // wide_rule.cu only
  GdnTokens wide_q, wide_k, wide_v, wide_d_o;
  int wide_slices;         // of 32 value columns
  float* wide_checkpoints; // [capacity * 4, value_heads, key_dim, value_dim]
  float* wide_z;           // [tokens, value_heads, value_dim]
  float* wide_parts;       // [tokens, value_heads, slices, 2 * 256 + 2]: dq, dk, dg, dbeta
};

void launch_prepare(const RuleArgs& args, const LaunchContext& context);
void launch_forward_scan(const RuleArgs& args, const LaunchContext& context);
void launch_rebuild_scan(const RuleArgs& args, const LaunchContext& context);
void launch_reverse_scan(const RuleArgs& args, const LaunchContext& context);
void launch_gradients(const RuleArgs& args, const LaunchContext& context);

// The whole of either direction, for widths beyond the kernels above.
void launch_wide_forward(const RuleArgs& args, const LaunchContext& context);
void launch_wide_backward(const RuleArgs& args, const float* initial, const float* d_final,
                          float* d_initial, const LaunchContext& context);

} // namespace gdn::kernels
