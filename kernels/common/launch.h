#pragma once
#include <cstdint>

struct CUstream_st; // cudaStream_t is CUstream_st*

namespace gdn::kernels {

// A bfloat16 value in memory; host code moves and converts it, device code reads it as
// __nv_bfloat16.
struct Bf16 {
  std::uint16_t bits;
};

// Where a launcher puts its work. Launchers never allocate, synchronise or read device memory, so
// every one of them can be captured in a CUDA graph.
struct LaunchContext {
  CUstream_st* stream = nullptr;
  int sm_count = 132; // multiprocessors of the device, sizes persistent grids
  void* scratch =
      nullptr; // device memory, 256-byte aligned, of the launcher's ..._scratch() bytes
  std::int64_t scratch_bytes = 0;
};

} // namespace gdn::kernels
