#include "trainer/checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/atomic_file.h"

namespace gdn::trainer::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step_", kPart = ".part";

[[noreturn]] void fail(const fs::path& path, const std::string& what, int error) {
  throw Error(ErrorCode::Io, fmt::format("{}: cannot {}: {}", path.string(), what, std::strerror(error)));
}

// Names inside a folder are durable once the folder is.
void sync(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return; // not every file system can; see AtomicFile
  ::fsync(file);
  ::close(file);
}

void remove_parts(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> parts;
  for (const fs::directory_entry& e : fs::directory_iterator(folder, ignored)) {
    const std::string name = e.path().filename().string();
    if (name.rfind(kPrefix, 0) == 0 && name.size() > kPart.size() && name.compare(name.size() - kPart.size(), kPart.size(), kPart) == 0)
      parts.push_back(e.path());
  }
  for (const fs::path& p : parts) fs::remove_all(p, ignored);
}

} // namespace

fs::path step_folder(const fs::path& folder, std::int64_t step) { return folder / fmt::format("{}{:08}", kPrefix, step); }

fs::path part_folder(const fs::path& folder, std::int64_t step) { return step_folder(folder, step).string() + std::string(kPart); }

std::vector<StepFolder> step_folders(const fs::path& folder) {
  std::vector<StepFolder> found;
  std::error_code ignored;
  for (const fs::directory_entry& e : fs::directory_iterator(folder, ignored)) {
    const std::string name = e.path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    StepFolder f{0, e.path()};
    const char *first = name.data() + kPrefix.size(), *last = name.data() + name.size();
    const auto [end, error] = std::from_chars(first, last, f.step);
    if (error == std::errc() && end == last && f.path == step_folder(folder, f.step)) found.push_back(f);
  }
  std::sort(found.begin(), found.end(), [](const StepFolder& a, const StepFolder& b) { return a.step < b.step; });
  return found;
}

PendingCheckpoint::PendingCheckpoint(const fs::path& folder, std::int64_t step) : final_(step_folder(folder, step)) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail(folder, "create it", error.value());
  remove_parts(folder);
  path_ = part_folder(folder, step);
  if (!fs::create_directory(path_, error)) fail(path_, "create it", error ? error.value() : EEXIST);
}

PendingCheckpoint::~PendingCheckpoint() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void PendingCheckpoint::commit(const Manifest& manifest) {
  write_atomically(path_ / kManifestFile, to_json(manifest)); // syncs the folder too
  std::error_code ignored;
  if (!fs::exists(final_, ignored)) {
    if (::rename(path_.c_str(), final_.c_str()) != 0) fail(final_, "put the checkpoint in its place", errno);
    path_.clear();
  } else if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, final_.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system without the exchange: the older one goes first.
    fs::remove_all(final_, ignored);
    if (::rename(path_.c_str(), final_.c_str()) != 0) fail(final_, "put the checkpoint in its place", errno);
    path_.clear();
  } // else path_ names the older one now, and goes with this object
  sync(final_.parent_path());
}

std::optional<Reader> newest_whole(const fs::path& folder, const std::function<void(const std::string&)>& tell) {
  const std::vector<StepFolder> all = step_folders(folder);
  for (size_t i = all.size(); i-- > 0;) {
    try {
      Reader reader(all[i].path);
      reader.verify();
      return reader;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::Checkpoint && e.code() != ErrorCode::Io) throw;
      tell(fmt::format("{}{}", e.what(), i > 0 ? "; trying the one before" : ""));
    }
  }
  if (!all.empty())
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: none of its {} checkpoints is whole", folder.string(), all.size()),
                "start anew without --resume, or name another folder with --checkpoint");
  return std::nullopt;
}

void keep_newest(const fs::path& folder, std::int64_t count, std::int64_t step) {
  std::vector<StepFolder> all = step_folders(folder);
  while (!all.empty() && all.back().step > step) all.pop_back();
  for (size_t i = 0; i + static_cast<size_t>(count) < all.size(); ++i) {
    const fs::path away = all[i].path.string() + std::string(kPart);
    std::error_code ignored;
    fs::remove_all(away, ignored);
    if (::rename(all[i].path.c_str(), away.c_str()) != 0) fail(all[i].path, "remove it", errno);
    fs::remove_all(away, ignored);
  }
}

} // namespace gdn::trainer::checkpoint
