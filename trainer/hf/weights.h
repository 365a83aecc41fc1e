#pragma once
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/export.h"
#include "trainer/parameters.h"

namespace gdn::trainer::hf {

// Every weight of a checkpoint into the parameters, whose table it was opened with. Masters take the
// stored values; what ops read is rounded to the run's dtype.
void load(const Checkpoint& checkpoint, Parameters& parameters);

// Every weight as its master holds it, into an export of the same table; the caller commits.
void store(Parameters& parameters, Export& out);

} // namespace gdn::trainer::hf
