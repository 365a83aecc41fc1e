#pragma once
#include <memory>
#include <optional>

#include "plan/estimate.h"
#include "trainer/setup.h"

namespace gdn::trainer {

// What the planner says a step takes, by the kernels of the device that runs it.
struct PredictedTime {
  Seconds step = 0;             // update included
  Seconds forward_backward = 0; // and the sums over ranks
};

// Prices settings of one setup on its hardware profile.
class TimePrediction {
public:
  // The arguments must outlive this.
  TimePrediction(const Setup& setup, const Device& device);
  TimePrediction(const Setup& setup, std::string_view device_name, const model::Provider& provider);

  // Unset where the setup's hardware profile is of another device.
  std::optional<PredictedTime> of(const plan::Setting& setting);
  // What a process takes of the device's memory beside what it allocates for a step: the profile's rows for each
  // process. 0 where the profile is of another device.
  Bytes outside() const;

private:
  std::string provider_;
  std::optional<config::Hardware> hardware_;
  std::unique_ptr<plan::Estimator> estimator_;
};

} // namespace gdn::trainer
