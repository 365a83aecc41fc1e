#include "trainer/cuda/gpus.h"

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "core/error.h"
#include "kernels/common/check.h"
#ifdef GDN_NCCL
#include "trainer/comm/nccl_world.h"
#endif

namespace gdn::trainer::cuda {

namespace {

// Open MPI; MPICH and Intel MPI; MVAPICH; Slurm.
std::optional<int> number(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const char* text = std::getenv(name)) return std::atoi(text);
  return {};
}

constexpr const char* kOneEach = "start at most as many ranks on a machine as it has GPUs, or show each rank its own (CUDA_VISIBLE_DEVICES)";

} // namespace

int gpu_of_rank() {
  int gpus = 0;
  GDN_CUDA(cudaGetDeviceCount(&gpus));
  const int rank = number({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}).value_or(0);
  if (gpus == 1) return 0; // connect_gpus finds out whether it is another rank's as well
  if (rank >= gpus)
    throw Error(ErrorCode::NoDevice, fmt::format("rank {} of this machine has no GPU: {} are visible, and every rank needs its own", rank, gpus), kOneEach);
  return rank;
}

std::unique_ptr<World> connect_gpus(World& host, CUstream_st* compute, int sm_count) {
#ifdef GDN_NCCL
  int device = 0;
  cudaDeviceProp mine;
  GDN_CUDA(cudaGetDevice(&device));
  GDN_CUDA(cudaGetDeviceProperties(&mine, device));
  std::vector<int> everybody(static_cast<size_t>(host.size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  constexpr size_t kId = sizeof mine.uuid;
  std::vector<std::byte> ids(kId * everybody.size());
  host.group(everybody)->all_gather(reinterpret_cast<const std::byte*>(&mine.uuid), ids.data(), kId);
  for (size_t r = 0; r < everybody.size(); ++r)
    if (static_cast<int>(r) != host.rank() && std::memcmp(ids.data() + r * kId, &mine.uuid, kId) == 0)
      throw Error(ErrorCode::NoDevice, fmt::format("ranks {} and {} have the same GPU ({}): every rank needs its own", std::min<size_t>(r, static_cast<size_t>(host.rank())),
                                                   std::max<size_t>(r, static_cast<size_t>(host.rank())), mine.name), kOneEach);
  NcclOptions options{.compute = compute, .sm_count = sm_count};
  if (const char* text = std::getenv("GDN_RANK_TIMEOUT"))
    if (const double seconds = std::atof(text); seconds > 0) options.patience = seconds;
  return start_nccl(host, options);
#else
  (void)compute;
  (void)sm_count;
  throw Error(ErrorCode::Config, fmt::format("{} ranks on GPUs, but this build has no NCCL", host.size()), "install NCCL with its headers and build again");
#endif
}

} // namespace gdn::trainer::cuda
