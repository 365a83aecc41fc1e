#include "trainer/comm/launch.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/communicator.h"
#ifdef GDN_MPI
#include "trainer/comm/mpi_world.h"
#endif

namespace gdn::trainer {

// Open MPI, then what PMI and PMIx launchers set (srun, MPICH's mpiexec).
int launched_ranks() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"})
    if (const char* text = std::getenv(name)) return std::max(1, std::atoi(text));
  if (std::getenv("PMIX_RANK") || std::getenv("PMI_RANK"))
    if (const char* text = std::getenv("SLURM_NTASKS")) return std::max(1, std::atoi(text));
  return 1;
}

std::unique_ptr<World> start_world() {
  const int ranks = launched_ranks();
  if (ranks == 1) return std::make_unique<Alone>();
#ifdef GDN_MPI
  return start_mpi();
#else
  throw Error(ErrorCode::Config, fmt::format("{} ranks were started, but this build has no MPI", ranks),
              "install an MPI with its headers (libopenmpi-dev) and build again");
#endif
}

int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"})
    if (const char* text = std::getenv(name)) return std::atoi(text);
  return 0;
}

namespace {

World*& running() {
  static Alone alone;
  static World* world = &alone;
  return world;
}

} // namespace

World& this_world() { return *running(); }

int run_ranks(const std::function<int(World&)>& body) {
  const std::unique_ptr<World> world = start_world();
  struct Restore {
    World* before = running();
    ~Restore() { running() = before; }
  } restore;
  running() = world.get();
  if (world->size() == 1) return body(*world);
  auto end = [&](ErrorCode code, const std::string& message, const std::string& hint) {
    // What all ranks find wrong is said once, by the first of them.
    if (world->rank() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    fmt::print(stderr, "gdntrain: error: rank {}: {}\n{}", world->rank(), message, hint.empty() ? "" : "  " + hint + "\n");
    std::fflush(stderr);
    world->abort(exit_status(code));
  };
  try {
    return body(*world);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::Interrupted) { // agreed on: everybody is here
      if (world->rank() == 0) fmt::print(stderr, "gdntrain: {}\n{}", e.what(), e.hint().empty() ? "" : "  " + e.hint() + "\n");
      return exit_status(e.code());
    }
    end(e.code(), e.what(), e.hint());
  } catch (const std::exception& e) {
    end(ErrorCode::Internal, std::string("unexpected: ") + e.what(), "");
  }
  return 1;
}

} // namespace gdn::trainer
