#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/units.h"
#include "kernels/common/fingerprint.h"
#include "model/provider.h"
#include "reference/random.h"
#include "trainer/comm/communicator.h"
#include "trainer/op_call.h"

namespace gdn::trainer {

struct AdamWUpdate {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  std::int64_t step = 1;        // 1-based
  double gradient_scale = 1;    // clipping
};

// What a pass launched, to be launched again as a whole.
class Recording {
public:
  virtual ~Recording() = default;
  // The same ops on the context's data: sequences of the same lengths, whoever they belong to. Does not wait.
  virtual void replay(const StepContext& context) = 0;
};

// What runs the ops and owns the memory they run on. Everything above it is the same on every device.
class Device {
public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;            // "cpu", "NVIDIA H200"
  virtual const model::Provider& provider() const = 0; // what its ops need and cost
  virtual Bytes memory() const = 0;                // total, for `fits`
  virtual FlopsPerSecond peak() const { return 0; } // dense bf16, of the data sheet; 0: unknown
  // The device's memory now. With nobody else there `used` is all that the process takes, its context and libraries
  // included. 0: unknown.
  struct MemoryNow {
    Bytes used = 0, free = 0;
  };
  virtual MemoryNow memory_now() { return {}; }

  // Memory for the whole run. Throws Error{DoesNotFit} naming `what` and the bytes.
  virtual std::byte* allocate(Bytes bytes, std::string_view what) = 0;
  virtual void deallocate(std::byte* data) = 0;
  int allocations() const { return allocations_; } // so far: none may happen inside a step

  virtual void fill(std::byte* data, Bytes bytes, unsigned char value) = 0;
  // Whether every byte is `value`.
  virtual bool holds(const std::byte* data, Bytes bytes, unsigned char value) = 0;
  // Of n fp32 numbers, by their bits and places: equal where all bits are equal, on every device.
  virtual kernels::Fingerprint fingerprint(const float* data, std::int64_t n) = 0;
  virtual void to_device(std::byte* to, const void* from, Bytes bytes) = 0;
  virtual void to_host(void* to, const std::byte* from, Bytes bytes) = 0;
  virtual void synchronise() = 0;

  // The ranks of `host`, exchanging this device's memory; null: `host` itself does. All ranks together; `host` and the
  // device outlive it. Throws Error{NoDevice} when ranks cannot have a device each.
  virtual std::unique_ptr<World> connect(World&) { return nullptr; }

  // Around the ops of a step. A device may bring the step's data over before it (and allocate for it), and leave
  // what it collected in context.totals behind it.
  virtual void begin_step(const StepContext&) {}
  virtual void end_step(const StepContext&) {}

  virtual void run(const OpCall& call) = 0;
  // The same, waiting for it: seconds.
  virtual Seconds run_timed(const OpCall& call);
  // Whether it can record passes, and a pass recorded: `pass` runs ops on the context's data (it is called twice, executed
  // once, and may neither allocate nor wait), in place of begin_step and running it. What the ops work on must stay where it is.
  virtual bool records() const { return false; }
  virtual std::unique_ptr<Recording> record(const StepContext&, const std::function<void()>&) { return nullptr; }
  // Whether run() returns before the op is done: timing every op then slows a step down.
  virtual bool asynchronous() const { return false; }
  // For who compares devices: fills the call's host table (op_call.h) of an op that has just run, where the device keeps
  // it elsewhere.
  virtual void fetch_host_table(const OpCall&) {}
  // Whether an op Rule keeps N in its tensor A, T = I - diag(beta) N, instead of the chunk's inverse T (kernels/gdn/NOTES.md).
  virtual bool rule_keeps_n() const { return false; }
  // Whether it has functions for tensors in this dtype.
  virtual bool takes(DType storage) const { return storage == DType::BF16 || storage == DType::FP32; }
  // Throws Error{Config} naming the op kind and why this device cannot run it.
  virtual void check_runs(const model::Op& op) const = 0;

  // The update phase. Sum of squares in double and in a fixed order.
  virtual double sum_of_squares(const float* gradient, std::int64_t n) = 0;
  // `live` is the parameter in the run's dtype, rounded from the master; absent: the master is it.
  virtual void adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v,
                     std::int64_t n, View live) = 0;
  virtual void convert(const float* from, View to) = 0; // [1, n], rounded once
  // to[i] = stddev * stream.normal(first + i), n values, if the device makes random numbers itself; else false.
  virtual bool fill_normal(float*, std::int64_t, double, const reference::RandomStream&, std::int64_t) { return false; }

protected:
  int allocations_ = 0;
};

// Owns one allocation of a device.
class DeviceMemory {
public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, Bytes bytes, std::string_view what)
      : device_(&device), data_(device.allocate(bytes, what)), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& o) noexcept : device_(o.device_), data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    std::swap(device_, o.device_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_) device_->deallocate(data_);
  }
  std::byte* data() const { return data_; }
  Bytes bytes() const { return bytes_; }

private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  Bytes bytes_ = 0;
};

} // namespace gdn::trainer
