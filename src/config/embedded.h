#pragma once
#include <string_view>
#include <vector>

// Profiles compiled in: the content of profiles/, written into C++ by tools/embed_profiles.cpp.
namespace gdn::config {

struct EmbeddedFile {
  std::string_view name;   // without suffix
  std::string_view text;
  std::string_view packed; // the text as parsed (packed.h)
};
const std::vector<EmbeddedFile>& embedded_models();
const std::vector<EmbeddedFile>& embedded_hardware();

} // namespace gdn::config
