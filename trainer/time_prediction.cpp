#include "trainer/time_prediction.h"

#include "config/profiles.h"

namespace gdn::trainer {

TimePrediction::TimePrediction(const Setup& setup, const Device& device) : TimePrediction(setup, device.name(), device.provider()) {}

TimePrediction::TimePrediction(const Setup& setup, std::string_view device_name, const model::Provider& provider)
    : provider_(provider.name()) {
  config::Hardware hardware = config::Profiles().hardware(setup.profile.hardware);
  if (hardware.device_name != device_name) return;
  hardware_ = std::move(hardware);
  estimator_ = std::make_unique<plan::Estimator>(setup.profile.model, setup.profile.run, *hardware_, std::nullopt, &provider);
}

std::optional<PredictedTime> TimePrediction::of(const plan::Setting& setting) {
  if (!estimator_) return {};
  const plan::Estimate e = estimator_->evaluate(setting);
  return PredictedTime{e.step_seconds, e.step_seconds - e.optimizer_seconds};
}

Bytes TimePrediction::outside() const {
  Bytes sum = 0;
  if (!hardware_) return 0;
  for (const config::ReserveRow& row : hardware_->reserve_of(provider_))
    if (row.per == "process") sum += row.bytes;
  return sum;
}

} // namespace gdn::trainer
