#pragma once
#include <cstdint>
#include <vector>

#include "config/run.h"

// Which decoder layers a pipeline rank holds.
namespace gdn::model {

// A virtual stage: consecutive decoder layers on one rank. MTP layers are not counted: they sit
// behind the last chunk.
struct Chunk {
  std::int64_t rank = 0;          // pipeline rank
  std::int64_t virtual_stage = 0; // 0 <= virtual_stage < vp
  std::int64_t first = 0;         // decoder layer
  std::int64_t layers = 0;
  bool is_first = false, is_last = false; // of the model: embedding; final norm, head and MTP
};

// All pp * vp chunks in model order; chunk i lies on rank i % pp. The layout of `parallel` gives
// the sizes, else every chunk holds layers / (pp * vp).
// Throws Error{Config} when the layers do not divide, or the layout does not add up to them.
std::vector<Chunk> pipeline_chunks(std::int64_t layers, const config::Parallel& parallel);

// The chunks of one pipeline rank, by virtual stage.
std::vector<Chunk> chunks_of_rank(std::int64_t layers, const config::Parallel& parallel,
                                  std::int64_t rank);

} // namespace gdn::model
