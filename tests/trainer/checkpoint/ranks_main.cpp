#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/run_cases.h"

#include <cstdlib>

// Test programs that start mpirun: 77 (skipped) without one.
int main(int argc, char** argv) {
  if (std::system("command -v mpirun >/dev/null") != 0) return 77;
  for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) setenv(name, "1", 1);
  setenv("GDN_RANK_TIMEOUT", "100", 0); // a hang is a failure, not a wait
  return gdn::test::run_cases(argc, argv);
}
