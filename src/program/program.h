#pragma once
#include <vector>

#include "program/schedule.h"
#include "program/trace.h"

// The flat list of one step on one rank: what the trainer executes and the tests compare with.
namespace gdn::program {

// One unit instance of a chunk. List, spans and trace are shared by equal layers.
struct UnitInstance {
  const model::OpList* list = nullptr;
  const std::vector<Span>* spans = nullptr;
  const UnitTrace* trace = nullptr;
  int chunk = 0;
  std::string prefix = {}; // "layers.3.": canonical names of its parameters; "L03." in buffer names
};

class Program {
public:
  // A buffer of the whole step. Boundary tensors of neighbouring units are one buffer.
  struct Buffer {
    int unit = 0, micro_batch = 0;
    BufferId local = -1;
    Bytes bytes = 0;
    Category category = Category::Transient;
    bool external = false;
  };

  // One op or step; before it `allocs` are acquired, after it `frees` are released (storage order).
  struct Run {
    int unit = 0, micro_batch = 0, event = 0;
    std::vector<int> allocs = {}, frees = {};
    Bytes level = 0; // predicted live bytes while it runs, scratch included
    CategoryBytes by = {};
  };

  // `units` in model order, chunk by chunk.
  Program(std::vector<UnitInstance> units, std::vector<Slot> slots, int micro_batches);

  const std::vector<UnitInstance>& units() const { return units_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  const std::vector<Run>& runs() const { return runs_; }
  // The flat buffer behind a unit's local one.
  int buffer(int unit, int micro_batch, BufferId local) const;
  std::string buffer_name(int id) const; // "L03.qkv#mb2.g1"
  std::string run_name(const Run& run) const; // "L03 forward in_proj #mb2"

private:
  void bind();
  void schedule(const std::vector<Slot>& slots);
  void lifetimes();
  int backward_run(int unit, int micro_batch) const;

  std::vector<UnitInstance> units_;
  int micro_batches_;
  std::vector<Buffer> buffers_;
  std::vector<Run> runs_;
  std::vector<std::vector<std::vector<int>>> flat_; // [unit][micro_batch][local]
  std::vector<std::vector<int>> backward_at_;       // [unit][micro_batch]: first run of its backward
};

} // namespace gdn::program
