#pragma once
#include <functional>
#include <string>
#include <vector>

#include "program/layout.h"
#include "program/program.h"
#include "program/transfers.h"
#include "trainer/device.h"
#include "trainer/ledger.h"
#include "trainer/parameters.h"

namespace gdn::trainer {

// What the executor does, run by run: a program with its addresses. The tests of the executor change
// single entries of it and must see a failure each time.
struct Script {
  struct Acquire {
    int buffer;
    Bytes offset; // in the arena
  };
  struct Line {
    int unit, micro_batch, event;
    std::vector<Acquire> acquires;
    std::vector<int> releases;
    Bytes scratch = 0, scratch_offset = -1;
    std::vector<program::Transfer> receives = {}, sends = {}; // from and to other pipeline ranks
  };
  std::vector<Line> lines;
  Bytes extent = 0, guard = 0;
};
inline constexpr Bytes kGuard = 64; // bytes around every buffer
Script script(const program::Program& program, const program::Layout& layout);
// The same with what the neighbours in a pipeline give and get.
Script script(const program::Program& program, const program::Layout& layout, const config::Parallel& parallel,
              std::int64_t pipeline_rank, int micro_batches);

struct Checks {
  bool poison = true;       // fill buffers on acquire and release, check the guard bands
  bool equality = true;     // ledger against prediction at every event
};

// Told about every line of a run; `index` counts the script's lines. Either may be empty.
struct Observer {
  std::function<void(size_t index, const OpCall& call, Seconds seconds)> ran = {}; // nothing is freed yet
  std::function<void(size_t index)> released = {};                                 // what the line frees is free
};

// Runs a program event by event on a device: acquires and releases real memory, hands every op only
// what it declared, and compares the ledger with the prediction as it goes.
class Executor {
public:
  // The program must outlive the executor. Allocates the arena. `foreign`: the program was laid out for
  // another provider than the device's; its scratch is then reserved and unused, and ops get scratch
  // outside the ledger. Throws Error{Config} for an op that the device cannot run.
  Executor(const program::Program& program, Script script, Device& device, Parameters& parameters, Ledger& ledger,
           Checks checks = {}, bool foreign = false);
  ~Executor() { abandon(); }

  // All micro-batches, forward and backward; gradients accumulate into the parameters. After an error
  // nothing is held any more.
  void run(const StepContext& context, const Observer& observer = {});

  void set_checks(Checks checks) { checks_ = checks; } // between steps
  const program::Program& program() const { return program_; }
  Bytes arena_bytes() const { return arena_.bytes(); }
  // The arena a script needs, bytes.
  static Bytes arena_bytes(const Script& script);

private:
  struct Held {
    std::byte* data = nullptr;
    Bytes bytes = 0;
    Ledger::Ticket ticket = -1;
  };

  void acquire(const Script::Acquire& a);
  void release(int buffer);
  void abandon(); // gives everything back to the ledger, unchecked
  void run_line(size_t index, const StepContext& context, const Observer& observer);
  OpCall call(const Script::Line& line, std::span<std::byte> scratch, const StepContext& context);
  void compare(size_t index) const;
  void set_guards(std::byte* data, Bytes bytes);
  void check_guards(const std::byte* data, Bytes bytes, const std::string& what) const;
  std::string line_name(const Script::Line& line) const;

  const program::Program& program_;
  Script script_;
  Device& device_;
  Parameters& parameters_;
  Ledger& ledger_;
  Checks checks_;
  DeviceMemory arena_;
  DeviceMemory own_scratch_; // foreign programs only
  std::vector<Held> held_;                                  // per buffer of the program
  Ledger::Ticket scratch_ticket_ = -1;
  std::vector<std::vector<std::vector<ParameterSlot*>>> slots_; // [unit][op][parameter]
  std::map<std::pair<int, int>, HostTables> tables_;        // (unit, micro-batch)
  CategoryBytes base_;                                      // the ledger before the step
};

} // namespace gdn::trainer
