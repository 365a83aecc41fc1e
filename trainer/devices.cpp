#include "trainer/devices.h"

#include "core/error.h"
#include "trainer/cpu/device.h"
#ifdef GDN_CUDA_DEVICE
#include "trainer/cuda/device.h"
#endif

namespace gdn::trainer {

std::unique_ptr<Device> make_device(const std::string& choice) {
#ifdef GDN_CUDA_DEVICE
  if (choice == "cuda" || (choice == "auto" && have_cuda_device())) return std::make_unique<CudaDevice>();
#else
  if (choice == "cuda")
    throw Error(ErrorCode::NoDevice, "--device cuda: this build has no CUDA backend", "--device cpu runs the same program on the CPU");
#endif
  return std::make_unique<CpuDevice>();
}

} // namespace gdn::trainer
