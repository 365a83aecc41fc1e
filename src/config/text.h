#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace gdn::config {

// What a document of a kind may hold.
struct TextLimits {
  std::size_t bytes;
  int values; // scalars, lists and maps
  const char* usual; // said of a file that is larger
};
inline constexpr TextLimits kConfiguration{256 << 10, 20000, "a configuration is a few KiB; is this the right file?"};
// A sweep has a set of rows for each of hundreds of settings.
inline constexpr TextLimits kMeasurements{8 << 20, 1000000, "a profile of a sweep is a few hundred KiB; is this the right file?"};
inline constexpr int kMaxDepth = 32; // nesting of maps and lists

// The whole file. Error{Config} naming the path if it is missing, a directory, unreadable, or
// larger than the limit.
std::string read_text_file(const std::filesystem::path& path, const TextLimits& limits = kConfiguration);

// Throws Error{Config} at file:line:column unless `text` is UTF-8 without control characters other
// than tab, line feed and carriage return, and no longer than the limit.
void require_text(std::string_view text, const std::string& file, const TextLimits& limits = kConfiguration);

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
