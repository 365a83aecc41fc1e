#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/run_cases.h"

#include "tests/trainer/hf_cases.h"

// Tests against the Hugging Face cases: 77 (skipped) without their folder.
int main(int argc, char** argv) {
  if (!std::filesystem::is_directory(gdn::test::hf_cases())) {
    std::puts("skipped: GDN_HF_CASES names no folder");
    return 77;
  }
  return gdn::test::run_cases(argc, argv);
}
