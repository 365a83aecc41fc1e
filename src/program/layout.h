#pragma once
#include <vector>

#include "program/program.h"

// Where every buffer of a step lies in one arena: a pure function of the program.
namespace gdn::program {

struct LayoutOptions {
  Bytes alignment = 256; // of every payload
  Bytes guard = 0;       // bytes kept free before and after every payload
};

// Offsets of payloads. A buffer of (unit, local buffer) has the same offset in every micro-batch
// that finds the same number of copies alive, so a pass's addresses depend on (chunk, slot) only.
struct Layout {
  std::vector<std::vector<Bytes>> allocs; // [run][i]: of run.allocs[i]
  std::vector<Bytes> scratch;             // [run]: -1 where the run has none
  Bytes extent = 0;                       // bytes of the arena
  Bytes guard = 0;
};

// Buffers alive at the same time never overlap. Largest first, each at the lowest free offset
// between those that are ever alive together with it.
Layout lay_out(const Program& program, const LayoutOptions& options = {});

} // namespace gdn::program
