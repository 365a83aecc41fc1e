#pragma once
#include <map>
#include <vector>

#include "trainer/cpu/device.h"
#include "trainer/decorated_device.h"

namespace gdn::trainer {

// The CPU device, and beside every fp32 number of a run the same number computed in double from the
// same weights and tokens. Integers (which experts a token goes to) are shared. For runs in fp32.
class ExactDevice final : public DecoratedDevice {
public:
  ExactDevice() : DecoratedDevice(cpu_) {}

  std::byte* allocate(Bytes bytes, std::string_view what) override;
  void deallocate(std::byte* data) override;
  void fill(std::byte* data, Bytes bytes, unsigned char value) override;
  void to_device(std::byte* to, const void* from, Bytes bytes) override; // fp32 weights
  void run(const OpCall& call) override;

  // The doubles beside n floats: a gradient of the parameters.
  std::vector<double> values(const float* at, std::int64_t n);

private:
  std::byte* beside(const std::byte* at); // Error{Internal} for memory that is not this device's

  CpuDevice cpu_;
  std::map<const std::byte*, std::vector<std::byte>> shadows_; // twice the bytes of each allocation
  std::map<const model::OpList*, model::OpList> wide_;
};

} // namespace gdn::trainer
