#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace gdn::config {

// A word of a shell command line.
struct ShellWord {
  std::string text;
  std::string where;     // file:line:column of its first character
  bool expands = false;  // holds $ or ` outside single quotes: the shell would change it
};

// Splits text as a POSIX shell would: quotes, backslash escapes and continuations, # comments. A
// newline is a blank. Error{Config} for an unterminated quote.
std::vector<ShellWord> shell_words(std::string_view text, const std::string& file);

} // namespace gdn::config
