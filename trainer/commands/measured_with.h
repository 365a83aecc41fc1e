#pragma once
#include <fstream>
#include <string>

namespace gdn::trainer {

// This process's command line, for the head of a measured file: "gdntrain bench ops examples/tiny.yaml".
inline std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text, word;
  while (std::getline(file, word, '\0')) {
    if (text.empty()) word = word.substr(word.rfind('/') + 1);
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

} // namespace gdn::trainer
