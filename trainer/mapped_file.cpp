#include "trainer/mapped_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

MappedFile::MappedFile(const std::filesystem::path& path) {
  auto fail = [&](const char* reason) -> Error {
    return {ErrorCode::Io, fmt::format("{}: cannot be read: {}", path.string(), reason)};
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw fail(std::strerror(errno));
  struct stat status = {};
  void* start = nullptr;
  int error = ::fstat(file, &status) == 0 ? 0 : errno;
  const bool regular = error == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<size_t>(status.st_size);
  if (regular && size > 0) { // an empty mapping does not exist; an empty file does
    start = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    if (start == MAP_FAILED) error = errno;
  }
  ::close(file); // the mapping holds the file
  if (error != 0) throw fail(std::strerror(error));
  if (!regular) throw fail("not a regular file");
  if (size > 0) content_ = {static_cast<const char*>(start), size};
}

MappedFile::~MappedFile() {
  if (!content_.empty()) ::munmap(const_cast<char*>(content_.data()), content_.size());
}

} // namespace gdn::trainer
