#pragma once
#include <vector>

#include "core/category.h"
#include "program/trace.h"

// Levels of live bytes along a trace, and what a unit adds to a chunk.
namespace gdn::program {

struct Peak {
  Bytes bytes = 0;
  CategoryBytes by = {};
  int event = -1;

  void raise(const CategoryBytes& level, Bytes scratch, int at) {
    if (Bytes total = level.total() + scratch; event < 0 || total > bytes) {
      bytes = total;
      by = level;
      by[Category::Workspace] += scratch;
      event = at;
    }
  }
};

// Absolute levels of a unit alone, from an empty start; external buffers are not counted.
// `at_event[e]` is the level while event e runs (scratch included), `after[e]` once it has freed.
struct Levels {
  std::vector<Bytes> at_event, after;
  Peak forward, backward, replay;      // highest during events of that pass
  Bytes retained = 0;                  // crossing from forward to backward, the output excluded
};
Levels levels(const UnitTrace& trace);

// One pass of a unit, relative to the level before it. Boundary tensors belong to the unit that
// reads them: the input (and d:output) counts from entry, the output (and d:input) until exit.
// Attributes overwritten by the next run (sticky) of an earlier run may still be alive at entry and
// go at the events that bind new ones: segment i of `segments` ends with binding i.
struct PassSummary {
  struct Segment {
    Peak run;    // forward or backward events, and the level at entry
    Peak replay; // replayed events; event -1 where there is none
  };
  CategoryBytes delta = {};
  std::vector<Segment> segments = {};
  bool binds = false;
};

struct UnitSummary {
  PassSummary forward;
  PassSummary backward;       // attributes meanwhile belong to another run
  PassSummary backward_held;  // attributes are this micro-batch's own and outlive the pass
  std::vector<Bytes> sticky = {};    // bytes bound at each binding of a pass
  bool sticky_crosses = false;       // they live until this micro-batch's backward anyway
  CategoryBytes retained = {};       // = forward.delta
  Bytes input_bytes = 0;
};
UnitSummary summarise(const UnitTrace& trace);

} // namespace gdn::program
