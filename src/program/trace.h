#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/op.h"
#include "model/provider.h"
#include "program/forest.h"

// One unit (an op list under its spans) traced for one micro-batch: which op runs when, in which
// pass, on which buffers. Liveness, levels and the flat program all follow from the trace.
namespace gdn::program {

enum class Pass { Forward, Replay, Backward };
std::string_view name_of(Pass pass);

using BufferId = int;

// (storage, generation) of one unit and micro-batch, or a gradient "d:".
struct Buffer {
  model::TensorId tensor = -1;  // the tensor that named it: storage's first, or whose gradient it is
  bool gradient = false;
  int generation = 0;
  Bytes bytes = 0;
  Category category = Category::Transient;
  bool external = false;        // never counted
  // Events (indices into UnitTrace::events). alloc -1: alive at entry (the unit's input); the
  // gradient of the unit's output is alive from the first backward event on. last: the last reader
  // or holder; the buffer is freed after it.
  int alloc = -1, last = -1;
  int drop = -1, refill = -1;   // discard spans: dead between the end of `drop` and `refill`
};

enum class AccessMode { Read, Write, Accumulate };

struct Access {
  BufferId buffer = -1;
  model::TensorId tensor = -1;  // which view of the buffer
  AccessMode mode = AccessMode::Read;
  bool gradient = false;
};

// One op (step -1) or one backward step running in a pass.
struct Event {
  int op = 0, step = -1;
  Pass pass = Pass::Forward;
  int span = -1;                 // Replay: the span that caused it
  std::uint32_t first_access = 0, access_count = 0;
  Bytes scratch = 0;
};

struct TraceOptions {
  bool input_gradient = true;             // d:input is wanted (false below the first trainable part)
  bool external_output_gradient = false;  // a module alone: dO is the caller's
  bool backward = true;                   // false: evaluation, nothing is recorded or replayed
};

struct UnitTrace {
  const model::OpList* list = nullptr;
  std::vector<Buffer> buffers;
  std::vector<Event> events;              // forward events first
  std::vector<Access> accesses;
  int forward_end = 0;                    // events [0, forward_end) are the forward pass
  BufferId input = -1, output = -1, input_gradient = -1, output_gradient = -1;
  // Attributes overwritten by the op's next run: (event that binds, buffer).
  struct Sticky { int event; BufferId buffer; };
  std::vector<Sticky> sticky;

  // "qkv.g1", "d:qkv"
  std::string buffer_name(BufferId id) const;
  // "forward gdn.rule", "replay(gdn_qkv) conv1d", "backward rule.backward"
  std::string event_name(int event, const std::vector<Span>& spans) const;
};

// Traces `list` (which must outlive the trace) under `spans`. Throws Error{Config} when a discarded
// tensor would be read before its replay, or spans are illegal (span.h).
UnitTrace trace(const model::OpList& list, const std::vector<Span>& spans, const model::Provider& provider,
                const TraceOptions& options = {});

} // namespace gdn::program
