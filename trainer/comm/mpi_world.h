#pragma once
#include <memory>

#include "trainer/comm/communicator.h"

namespace gdn::trainer {

// Initialises MPI; the ranks of MPI_COMM_WORLD, exchanging host memory. MPI ends with the world.
// Throws Error{Mpi} when MPI cannot start. Only one may exist.
std::unique_ptr<World> start_mpi();

} // namespace gdn::trainer
