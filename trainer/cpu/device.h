#pragma once
#include "trainer/device.h"

namespace gdn::trainer {

// Runs ops with the reference functions in host memory. Results do not depend on the machine.
class CpuDevice final : public Device {
public:
  CpuDevice();

  std::string name() const override { return "cpu"; }
  const model::Provider& provider() const override;
  Bytes memory() const override { return memory_; }

  std::byte* allocate(Bytes bytes, std::string_view what) override;
  void deallocate(std::byte* data) override;
  void fill(std::byte* data, Bytes bytes, unsigned char value) override;
  bool holds(const std::byte* data, Bytes bytes, unsigned char value) override;
  kernels::Fingerprint fingerprint(const float* data, std::int64_t n) override;
  void to_device(std::byte* to, const void* from, Bytes bytes) override;
  void to_host(void* to, const std::byte* from, Bytes bytes) override;
  void synchronise() override {}

  void run(const OpCall& call) override;
  void check_runs(const model::Op& op) const override;

  double sum_of_squares(const float* gradient, std::int64_t n) override;
  void adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v, std::int64_t n,
             View live) override;
  void convert(const float* from, View to) override;

private:
  Bytes memory_ = 0; // of the machine
};

// What the reference functions need: scratch as they declare it, work counted by the formulas of ops.
const model::Provider& cpu_provider();

} // namespace gdn::trainer
