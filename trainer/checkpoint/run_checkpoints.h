#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "trainer/checkpoint/folder.h"
#include "trainer/session.h"
#include "trainer/setup.h"

namespace gdn::trainer::checkpoint {

struct CheckpointOptions {
  std::string folder = {};  // empty: checkpoints/ in the run's output folder
  std::int64_t every = 0;   // steps; 0: only at the end and when the run is interrupted
  std::int64_t keep = 0;    // newest ones; 0: all
  std::string resume = {};  // "latest", a step, the path of a checkpoint; empty: start anew
  bool write = false;       // any of the first three was given
};

// What a run keeps, and what it starts from. Everything random is a pure function of seed, step and
// micro-batch, so weights, moments and the number of steps done are the whole state. With several ranks
// all of them call each function together.
class RunCheckpoints {
public:
  // `data`: where tokens come from, in words. `tell` gets lines for the user. The ranks are those of this_world().
  RunCheckpoints(CheckpointOptions options, const Setup& setup, std::string data, const std::filesystem::path& output,
                 std::function<void(const std::string&)> tell);

  // Opens what --resume names: the steps done there, 0 to start anew ("latest" of an empty folder). The first
  // rank chooses and reads all of it. Error{Checkpoint} when it is broken (an explicit one), of another model,
  // or all of several are broken.
  std::int64_t open(const Ranks& ranks);
  // Puts the opened state into a session, whatever stack and parallelism wrote it, and writes it when it
  // is owed: a run that starts from another folder can be resumed from its own. Without one: nothing.
  void restore(Session& session);

  // After a step: writes when one is due.
  void after_step(Session& session, std::int64_t step);
  // When the run ends, done or interrupted: writes if it owes this step.
  void finish(Session& session, std::int64_t step);
  // Checkpoints were asked for, and the folder has none of this step: it comes from another folder, perhaps
  // divided in another way.
  bool owes(std::int64_t step) const { return options_.write && step > last_; }
  std::int64_t last_step() const { return last_; } // of the newest whole checkpoint in the folder; 0: none
  const std::filesystem::path& folder() const { return folder_; }

private:
  void choose();
  void save(Session& session, std::int64_t step);
  void compare() const; // Error for another model, a line for everything else that differs

  CheckpointOptions options_;
  std::filesystem::path folder_;
  Manifest identity_; // model, run, train, data
  std::unique_ptr<Communicator> host_; // all ranks: texts are no device's memory, whatever the ranks train on
  std::function<void(const std::string&)> tell_;
  std::optional<Reader> source_ = {};
  std::int64_t last_ = 0;
  std::string started_from_ = {}; // a checkpoint of another folder
};

// Cuts a log of JSON lines with a "step" each after `step`: what a resumed run will write again, and a
// line that was cut short. A log that is not there stays so. Throws Error{Io}.
void cut_log(const std::filesystem::path& log, std::int64_t step);

} // namespace gdn::trainer::checkpoint
