#include "trainer/checkpoint/parameter_state.h"

namespace gdn::trainer::checkpoint {

std::vector<float> get(Parameters& parameters, const Item& item) {
  return item.state == "weight" ? parameters.weights(item.parameter->name) : parameters.moment(item.parameter->name, item.state == "v");
}

void set(Parameters& parameters, const Item& item, std::span<const float> values) {
  if (item.state == "weight") parameters.set_weights(item.parameter->name, values);
  else parameters.set_moment(item.parameter->name, item.state == "v", values);
}

} // namespace gdn::trainer::checkpoint
