#pragma once
#include <string>
#include <vector>

// Profiles compiled in: the content of profiles/, written into C++ by tools/embed.py.
namespace gdn::config {

struct EmbeddedFile {
  std::string name; // without suffix
  std::string text;
};
const std::vector<EmbeddedFile>& embedded_models();
const std::vector<EmbeddedFile>& embedded_hardware();

} // namespace gdn::config
