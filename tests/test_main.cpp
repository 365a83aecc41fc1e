#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/run_cases.h"

int main(int argc, char** argv) { return gdn::test::run_cases(argc, argv); }
