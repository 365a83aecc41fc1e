#include "trainer/devices.h"

#include "core/error.h"
#include "trainer/cpu/device.h"

namespace gdn::trainer {

std::unique_ptr<Device> make_device(const std::string& choice) {
  if (choice == "cuda")
    throw Error(ErrorCode::NoDevice, "--device cuda: this build has no CUDA backend", "--device cpu runs the same program on the CPU");
  return std::make_unique<CpuDevice>();
}

} // namespace gdn::trainer
