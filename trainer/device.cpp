#include "trainer/device.h"

#include <chrono>

namespace gdn::trainer {

Seconds Device::run_timed(const OpCall& call) {
  const auto start = std::chrono::steady_clock::now();
  run(call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

} // namespace gdn::trainer
