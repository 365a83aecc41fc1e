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
struct PassSummary {
  CategoryBytes delta = {};
  Peak run, replay; // forward or backward events; replayed ones. event -1 where there is none
  // Units with attributes: what lives during each event, scratch included.
  std::vector<CategoryBytes> levels = {};
  std::vector<bool> replayed = {};
  int first_event = 0;
};

// A buffer that an attribute of the module refers to until the op's next run, in any micro-batch,
// binds another one (HoldKind::NextForward). Events count from the start of their pass.
struct Attribute {
  struct Use {
    int bound = -1;           // first event that binds it in the pass; -1: none
    CategoryBytes after = {}; // what it alone keeps alive when such a pass has ended
  };
  Use forward, backward;
  CategoryBytes held = {};    // generation 0 crosses to its micro-batch's backward anyway
  int own_end = -1;           // event of that backward after which the attribute alone keeps `held`
};

struct UnitSummary {
  PassSummary forward, backward;
  std::vector<Attribute> attributes = {};
  CategoryBytes retained = {};       // = forward.delta
  Bytes input_bytes = 0;
};
UnitSummary summarise(const UnitTrace& trace);

} // namespace gdn::program
