#pragma once
#include <string>
#include <vector>

#include "core/category.h"
#include "model/op.h"
#include "model/provider.h"
#include "model/span.h"
#include "program/schedule.h"
#include "program/trace.h"

// The engine's contract executed as an autograd engine with checkpoints would execute it: frames with
// local variables, a tape whose nodes hold what they saved, checkpoint objects, gradients in counted
// buffers, storages that are resized to zero and filled again. Nothing is derived from lifetimes: a
// byte is live exactly while somebody refers to it. Shares no code with src/program.
namespace gdn::brute {

// One op or backward step running.
struct Sample {
  int unit = 0, micro_batch = 0;
  int op = 0, step = -1;
  program::Pass pass = program::Pass::Forward;
  int span = -1;            // Replay: the span that caused it
  Bytes before = 0;         // level just before it allocates
  Bytes level = 0;          // level while it runs, scratch included
  CategoryBytes by = {};
  // Per gradient it writes: 'w' writes, 'a' accumulates, '?' the region is covered in part.
  std::string writes = {};
};

struct Execution {
  std::vector<Sample> samples;
  Bytes retained = 0;       // of the first forward: alive behind it, external included, the output not
  Bytes end_level = 0;      // after everything, attributes of the next forward still set
  std::vector<Bytes> slot_levels; // after each slot
  std::vector<size_t> slot_ends;  // samples up to the end of each slot
  // Counted memories that are live during each sample, by index into `names`; external ones are unnamed.
  std::vector<std::vector<int>> live;
  std::vector<std::string> names;
};

struct Unit {
  const model::OpList* list = nullptr;
  const std::vector<model::Span>* spans = nullptr;
  program::TraceOptions options = {};
  int chunk = 0;
};

// Runs all micro-batches of `slots` through the units of each chunk, in order. Throws gdn::Error for
// illegal spans, for a read of a discarded tensor and for a contradictory gradient alias.
Execution execute(const std::vector<Unit>& units, const std::vector<program::Slot>& slots,
                  const model::Provider& provider);

// One unit, one micro-batch, forward and (unless options say otherwise) backward.
Execution execute_alone(const model::OpList& list, const std::vector<model::Span>& spans,
                        const model::Provider& provider, const program::TraceOptions& options = {});

} // namespace gdn::brute
