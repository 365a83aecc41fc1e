#pragma once
#include <doctest/doctest.h>

#include "trainer/comm/launch.h"
#include "trainer/comm/ranks.h"

// The world of the test program.
namespace gdn::trainer::ranks_test {

void set_world(World& world);
World& world();

} // namespace gdn::trainer::ranks_test
