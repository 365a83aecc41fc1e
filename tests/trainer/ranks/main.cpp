#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "tests/trainer/ranks/ranks.h"

// Every rank runs the same test cases. A rank that throws ends all of them.
int main(int argc, char** argv) {
  return gdn::trainer::run_ranks([&](gdn::trainer::World& world) {
    gdn::trainer::ranks_test::set_world(world);
    doctest::Context context(argc, argv);
    context.setOption("no-intro", true);
    if (world.rank() != 0) context.setOption("minimal", true); // failures only
    const int failed = context.run();
    return failed;
  });
}
