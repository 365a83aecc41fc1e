#pragma once
#include <cstdint>
#include <vector>

#include "program/program.h"

// What a pipeline rank gets from its neighbours and gives to them.
namespace gdn::program {

// A boundary buffer of a chunk on its way to or from another pipeline rank.
struct Transfer {
  int buffer = -1;  // of the program
  int peer = 0;     // pipeline rank
  int tag = 0;      // names (boundary, pass, micro-batch): equal on both sides, else unique
  Bytes bytes = 0;
};

struct RunTransfers {
  std::vector<Transfer> receives; // after the run's buffers are acquired, before it starts
  std::vector<Transfer> sends;    // after it, before buffers are released
};

// For every run of the program of pipeline rank `rank` of `pp`, whose chunks are its virtual stages: the
// residual stream arrives when its buffer is acquired and leaves when the chunk has no more use for it, its
// gradient likewise the other way.
std::vector<RunTransfers> transfers(const Program& program, int pp, int rank, int vp, int micro_batches);

// Messages that go one way between a rank and another: activations or gradients.
struct Route {
  bool sends = false;
  int peer = 0;
  int tag = 0;       // of the first one: even for activations
  Bytes largest = 0;
};

// In the order of their first messages, in which two ends can wait for each other on every route without a circle.
std::vector<Route> routes(const std::vector<RunTransfers>& transfers);

} // namespace gdn::program
