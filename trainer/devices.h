#pragma once
#include <memory>
#include <string>

#include "trainer/device.h"

namespace gdn::trainer {

// "cpu", "cuda", or "auto": cuda where this build and this machine have it, else the CPU. Throws
// Error{NoDevice} when cuda is asked for and is not there.
std::unique_ptr<Device> make_device(const std::string& choice);

} // namespace gdn::trainer
