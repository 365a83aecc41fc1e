#pragma once
#include <chrono>

#include "trainer/device.h"

namespace gdn::trainer {

// A device that does what another does: the base of those that watch it. It records no passes: who watches sees every op.
class DecoratedDevice : public Device {
public:
  explicit DecoratedDevice(Device& inner) : inner_(inner) {}
  std::string name() const override { return inner_.name(); }
  const model::Provider& provider() const override { return inner_.provider(); }
  Bytes memory() const override { return inner_.memory(); }
  FlopsPerSecond peak() const override { return inner_.peak(); }
  MemoryNow memory_now() override { return inner_.memory_now(); }
  std::byte* allocate(Bytes bytes, std::string_view what) override {
    ++allocations_;
    return inner_.allocate(bytes, what);
  }
  void deallocate(std::byte* data) override { inner_.deallocate(data); }
  void fill(std::byte* data, Bytes bytes, unsigned char value) override { inner_.fill(data, bytes, value); }
  bool holds(const std::byte* data, Bytes bytes, unsigned char value) override { return inner_.holds(data, bytes, value); }
  kernels::Fingerprint fingerprint(const float* data, std::int64_t n) override { return inner_.fingerprint(data, n); }
  void to_device(std::byte* to, const void* from, Bytes bytes) override { inner_.to_device(to, from, bytes); }
  void to_host(void* to, const std::byte* from, Bytes bytes) override { inner_.to_host(to, from, bytes); }
  void synchronise() override { inner_.synchronise(); }
  std::unique_ptr<World> connect(World& host) override { return inner_.connect(host); }
  void begin_step(const StepContext& context) override { inner_.begin_step(context); }
  void end_step(const StepContext& context) override { inner_.end_step(context); }
  void run(const OpCall& call) override { inner_.run(call); }
  // Of what this device does to run it, which a derived one may have changed.
  Seconds run_timed(const OpCall& call) override {
    synchronise();
    const auto start = std::chrono::steady_clock::now();
    run(call);
    synchronise();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  bool asynchronous() const override { return inner_.asynchronous(); }
  void fetch_host_table(const OpCall& call) override { inner_.fetch_host_table(call); }
  bool rule_keeps_n() const override { return inner_.rule_keeps_n(); }
  bool takes(DType storage) const override { return inner_.takes(storage); }
  void check_runs(const model::Op& op) const override { inner_.check_runs(op); }
  double sum_of_squares(const float* gradient, std::int64_t n) override { return inner_.sum_of_squares(gradient, n); }
  void adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v, std::int64_t n, View live) override {
    inner_.adamw(a, gradient, master, m, v, n, live);
  }
  void convert(const float* from, View to) override { inner_.convert(from, to); }
  bool fill_normal(float* to, std::int64_t n, double stddev, const reference::RandomStream& stream, std::int64_t first) override {
    return inner_.fill_normal(to, n, stddev, stream, first);
  }

protected:
  Device& inner_;
};

} // namespace gdn::trainer
