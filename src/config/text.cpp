#include "config/text.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::config {

namespace fs = std::filesystem;

std::string read_text_file(const fs::path& path, const TextLimits& limits) {
  auto fail = [&](const std::string& why, const std::string& hint = {}) -> Error {
    return Error(ErrorCode::Config, fmt::format("{}: {}", path.string(), why), hint);
  };
  std::error_code ec;
  fs::file_status status = fs::status(path, ec);
  if (status.type() == fs::file_type::not_found) throw fail("no such file");
  if (ec) throw fail("cannot be read: " + ec.message());
  if (fs::is_directory(status)) throw fail("is a directory, not a file");
  std::ifstream in(path, std::ios::binary);
  if (!in) throw fail(fmt::format("cannot be read: {}", std::strerror(errno)));
  // Read up to the limit instead of trusting a size: pipes and devices have none.
  std::string text(limits.bytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) throw fail("cannot be read");
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > limits.bytes) throw fail(fmt::format("is larger than {} KiB", limits.bytes / 1024), limits.usual);
  return text;
}

Positions::Positions(std::string_view text, const std::string& file) : file_(file), lines_{0} {
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\n') lines_.push_back(i + 1);
}

std::string Positions::at(std::size_t offset) const {
  auto line = std::upper_bound(lines_.begin(), lines_.end(), offset) - 1;
  return fmt::format("{}:{}:{}", file_, line - lines_.begin() + 1, offset - *line + 1);
}

namespace {

// Length of the valid UTF-8 sequence at the start of `s`; 0 if it is not one.
std::size_t utf8_length(std::string_view s) {
  auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
  unsigned char c = byte(0);
  if (c < 0x80) return 1;
  std::size_t n = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
  if (c < 0xC2 || c > 0xF4 || s.size() < n) return 0;
  for (std::size_t i = 1; i < n; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  // Overlong forms, surrogates and values above U+10FFFF.
  if ((c == 0xE0 && byte(1) < 0xA0) || (c == 0xED && byte(1) > 0x9F) || (c == 0xF0 && byte(1) < 0x90) ||
      (c == 0xF4 && byte(1) > 0x8F))
    return 0;
  return n;
}

} // namespace

void require_text(std::string_view text, const std::string& file, const TextLimits& limits) {
  if (text.size() > limits.bytes)
    throw Error(ErrorCode::Config, fmt::format("{}: is larger than {} KiB", file, limits.bytes / 1024), limits.usual);
  for (std::size_t i = 0; i < text.size();) {
    auto c = static_cast<unsigned char>(text[i]);
    std::size_t n = utf8_length(text.substr(i));
    if (n == 0)
      throw Error(ErrorCode::Config, fmt::format("{}: is not UTF-8 text (byte 0x{:02x})",
                                                 Positions(text, file).at(i), static_cast<unsigned>(c)));
    if ((c < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7F)
      throw Error(ErrorCode::Config,
                  fmt::format("{}: control character 0x{:02x}; this is not a text file",
                              Positions(text, file).at(i), static_cast<unsigned>(c)));
    i += n;
  }
}

} // namespace gdn::config
