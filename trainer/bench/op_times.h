#pragma once
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "trainer/decorated_device.h"
#include "trainer/session.h"
#include "trainer/setup.h"

namespace gdn::trainer::bench {

// One op kind at one shape and in one pass, and how long a run of it takes.
struct OpTime {
  std::string op;      // the first op like it: "gdn+moe.in_proj"
  model::OpKind kind = {};
  std::string pass;    // "forward", "backward", or the step: "dgrad", "wgrad"; replays count as forward
  std::string shape;   // of its tensors: "[8192, 2048] -> [8192, 12352]"
  model::Work work;    // of one run, as the program was laid out
  bool communicates = false;
  Seconds seconds = 0; // median
  int runs = 0;        // in one step
};

// Collects the times of a step's ops, several steps long.
class OpTimes {
public:
  explicit OpTimes(Session& session) : session_(session) {}
  Observer observer(); // for one step
  std::vector<OpTime> results() const; // those that take most of a step first

private:
  struct Samples {
    OpTime op;
    std::vector<double> seconds;
  };
  Session& session_;
  int steps_ = 0;
  std::map<std::tuple<model::OpKind, std::string, std::string>, Samples> samples_;
};

// Times every op behind a fill of a buffer that is larger than the cache, where the device is asynchronous:
// launches are covered by it, and inputs come from device memory.
class ColdDevice final : public DecoratedDevice {
public:
  explicit ColdDevice(Device& inner);
  Seconds run_timed(const OpCall& call) override;
  bool fill_normal(float* to, std::int64_t n, double stddev, const reference::RandomStream& stream, std::int64_t first) override {
    return inner_.fill_normal(to, n, stddev, stream, first); // weights of a large model are drawn where they are
  }

private:
  static constexpr Bytes kCover = Bytes{128} << 20;
  DeviceMemory cover_;
};

// Ops of `steps` steps of a configuration on the device, after one to warm up, on random data, and the update as
// one more ("optimizer.update", zeroing and norm included; host and device together). Throws Error{DoesNotFit}
// where the budget is too small.
std::vector<OpTime> time_ops(const Setup& setup, Device& device, Bytes budget, int steps);

} // namespace gdn::trainer::bench
