#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace gdn::config {

inline constexpr std::size_t kMaxFileBytes = 256 << 10; // no configuration is near this
inline constexpr int kMaxDepth = 32;                  // nesting of maps and lists
inline constexpr int kMaxValues = 20000;              // scalars, lists and maps in one document

// The whole file. Error{Config} naming the path if it is missing, a directory, unreadable, or
// larger than kMaxFileBytes.
std::string read_text_file(const std::filesystem::path& path);

// Throws Error{Config} at file:line:column unless `text` is UTF-8 without control characters other
// than tab, line feed and carriage return, and no longer than kMaxFileBytes.
void require_text(std::string_view text, const std::string& file);

// "file:line:column" of byte offsets, counted from 1. Keeps views of both.
class Positions {
public:
  Positions(std::string_view text, const std::string& file);
  std::string at(std::size_t offset) const;

private:
  const std::string& file_;
  std::vector<std::size_t> lines_; // offset at which each line starts
};

} // namespace gdn::config
