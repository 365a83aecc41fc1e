#pragma once
#include <functional>

#include "trainer/comm/communicator.h"

namespace gdn::trainer {

// Starts the world (start_world) and runs `body` on it; what it returns is the exit status. With several
// ranks an exception ends all of them: its message goes to stderr with the rank's number, and its exit
// status is everybody's. Alone, exceptions pass through.
int run_ranks(const std::function<int(World&)>& body);

// The world that run_ranks started last; a rank alone before that.
World& this_world();

// This rank's number as the launcher's environment has it, before anything is started; 0 without one.
int launched_rank();

} // namespace gdn::trainer
