#include "trainer/bench/versions.h"

#include <cctype>
#include <fstream>

#include <fmt/core.h>

#ifdef GDN_CUDA_DEVICE
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#endif

#include "trainer/bench/commit.h"

namespace gdn::trainer::bench {

#ifdef GDN_CUDA_DEVICE
namespace {

// The kernel module's own words where they can be read, else what the driver says of its API.
std::string driver() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;)
    if (std::isdigit(static_cast<unsigned char>(word[0])) && word.find('.') != std::string::npos) return word;
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) return "unknown";
  return fmt::format("for CUDA {}.{}", version / 1000, version % 1000 / 10);
}

} // namespace
#endif

std::string versions([[maybe_unused]] bool cuda) {
  std::string text = fmt::format("gdntrain {}", kBuiltFrom);
#ifdef GDN_CUDA_DEVICE
  if (cuda) {
    int runtime = 0;
    cudaRuntimeGetVersion(&runtime);
    const size_t lt = cublasLtGetVersion();
    text += fmt::format(", CUDA {}.{}, driver {}, cuBLASLt {}.{}.{}", runtime / 1000, runtime % 1000 / 10, driver(), lt / 10000, lt % 10000 / 100, lt % 100);
  }
#endif
  return text;
}

} // namespace gdn::trainer::bench
