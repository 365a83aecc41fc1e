#include "trainer/atomic_file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

namespace {

[[noreturn]] void io_failed(const std::filesystem::path& path, const char* what) {
  const int error = errno;
  throw Error(ErrorCode::Io, fmt::format("{}: cannot {}: {}", path.string(), what, std::strerror(error)),
              error == ENOSPC || error == EDQUOT ? "make room, then start the same command again" : "");
}

// Without this a crash can lose the renaming of a file that was safe itself. Not every file system
// can do it, and the file is safe already: failures are not errors.
void sync_folder(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;
  ::fsync(file);
  ::close(file);
}

} // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), temporary_(path_.string() + ".part") {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) io_failed(temporary_, "create it");
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::move(other.temporary_)), file_(std::exchange(other.file_, -1)) {}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(Bytes offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file_, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) io_failed(temporary_, "write it");
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += n;
  }
}

void AtomicFile::commit() {
  if (::fsync(file_) != 0) io_failed(temporary_, "make it durable");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) io_failed(path_, "put the new file in its place");
  ::close(std::exchange(file_, -1)); // after fsync there is nothing left that closing could lose
  sync_folder(path_);
}

void write_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

} // namespace gdn::trainer
