#pragma once
#include <filesystem>
#include <string_view>
#include <utility>

namespace gdn::trainer {

// A whole file, read-only in memory. Move-only; views of its content live as long as it does.
class MappedFile {
public:
  // Error{Io} naming the file and the system's reason.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept : content_(std::exchange(other.content_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(content_, other.content_);
    return *this;
  }
  ~MappedFile();

  std::string_view content() const { return content_; }

private:
  std::string_view content_ = {};
};

} // namespace gdn::trainer
