#pragma once
#include <cstdlib>
#include <filesystem>

namespace gdn::test {

// The folder of the Hugging Face checkpoints with reference results: GDN_HF_CASES (meson option hf_cases); empty if not set.
inline std::filesystem::path hf_cases() {
  const char* folder = std::getenv("GDN_HF_CASES");
  return folder ? folder : "";
}

} // namespace gdn::test
