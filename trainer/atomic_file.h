#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "core/units.h"

namespace gdn::trainer {

// A file written under a temporary name beside `path` and renamed in commit(): whoever looks at
// `path` sees the old file or the whole new one. Move-only; without commit() nothing is left.
// Every function throws Error{Io} naming the file and the system's reason.
class AtomicFile {
public:
  explicit AtomicFile(std::filesystem::path path);
  AtomicFile(AtomicFile&& other) noexcept;
  ~AtomicFile();

  const std::filesystem::path& path() const { return path_; }
  void write(Bytes offset, std::span<const std::byte> bytes);
  void commit(); // durable (fsync) before it takes the name

private:
  std::filesystem::path path_, temporary_;
  int file_ = -1;
};

// A whole text file, by the same way.
void write_atomically(const std::filesystem::path& path, std::string_view text);

} // namespace gdn::trainer
