#include "trainer/hf/weights.h"

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::trainer::hf {

namespace {

void require_whole(const ParameterSlot& slot) {
  if (slot.elements != slot.parameter->elements())
    throw Error(ErrorCode::Config, fmt::format("'{}': this rank holds {} of {} elements; Hugging Face checkpoints are read and "
                                               "written by runs on one rank", slot.name(), slot.elements, slot.parameter->elements()));
}

} // namespace

void load(const Checkpoint& checkpoint, Parameters& parameters) {
  for (const ParameterSlot& slot : parameters.slots()) {
    require_whole(slot);
    parameters.set_weights(slot.name(), checkpoint.read(*slot.parameter));
  }
}

void store(Parameters& parameters, Export& out) {
  for (const ParameterSlot& slot : parameters.slots()) {
    require_whole(slot);
    out.put(*slot.parameter, parameters.weights(slot.name()));
  }
}

} // namespace gdn::trainer::hf
