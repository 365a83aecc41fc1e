#pragma once
#include <memory>

#include "trainer/device.h"

namespace gdn::trainer {

// Whether a GPU is there that the kernels run on; `why` says what is missing.
bool have_cuda_device(std::string* why = nullptr);

// Runs ops with the kernels of kernels/ on one stream of this rank's GPU, asynchronously; exchanges between ranks on another. No allocation and no wait inside
// a step, but for one: an op that dispatches rows to expert ranks waits for how many will arrive. What a step collects stays in device memory until it ends. Results
// are bitwise repeatable.
class CudaDevice final : public Device {
public:
  // Throws Error{NoDevice} when there is none.
  CudaDevice();
  ~CudaDevice() override;

  std::string name() const override;
  const model::Provider& provider() const override;
  Bytes memory() const override;         // free when the device was opened
  FlopsPerSecond peak() const override;
  MemoryNow memory_now() override;

  std::byte* allocate(Bytes bytes, std::string_view what) override;
  void deallocate(std::byte* data) override;
  void fill(std::byte* data, Bytes bytes, unsigned char value) override;
  bool holds(const std::byte* data, Bytes bytes, unsigned char value) override;
  kernels::Fingerprint fingerprint(const float* data, std::int64_t n) override;
  void to_device(std::byte* to, const void* from, Bytes bytes) override;
  void to_host(void* to, const std::byte* from, Bytes bytes) override;
  void synchronise() override;

  std::unique_ptr<World> connect(World& host) override; // null for a rank alone

  void begin_step(const StepContext& context) override;
  void end_step(const StepContext& context) override;
  void run(const OpCall& call) override;
  Seconds run_timed(const OpCall& call) override;
  bool records() const override { return true; }
  std::unique_ptr<Recording> record(const StepContext& context, const std::function<void()>& pass) override; // a CUDA graph
  bool asynchronous() const override { return true; }
  void fetch_host_table(const OpCall& call) override;
  bool rule_keeps_n() const override { return true; }
  bool takes(DType storage) const override { return storage == DType::BF16; }
  void check_runs(const model::Op& op) const override;

  double sum_of_squares(const float* gradient, std::int64_t n) override;
  void adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v, std::int64_t n, View live) override;
  void convert(const float* from, View to) override;
  bool fill_normal(float* to, std::int64_t n, double stddev, const reference::RandomStream& stream, std::int64_t first) override;

private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace gdn::trainer
