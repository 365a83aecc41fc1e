#include "trainer/devices.h"

#include "core/error.h"
#include "trainer/cpu/device.h"
#ifdef GDN_CUDA_DEVICE
#include "trainer/cuda/device.h"
#endif

namespace gdn::trainer {

std::unique_ptr<Device> make_device(const std::string& choice) {
  std::string why = "this build has no CUDA backend";
#ifdef GDN_CUDA_DEVICE
  if (choice != "cpu" && have_cuda_device(&why)) return std::make_unique<CudaDevice>();
#endif
  if (choice == "cuda")
    throw Error(ErrorCode::NoDevice, "--device cuda: " + why, "--device cpu runs the same program on the CPU");
  return std::make_unique<CpuDevice>();
}

} // namespace gdn::trainer
