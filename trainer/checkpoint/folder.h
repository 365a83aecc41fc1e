#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trainer/checkpoint/reader.h"

// The folder of a run's checkpoints: step_00000100/ for each, whole or not there at all.
namespace gdn::trainer::checkpoint {

struct StepFolder {
  std::int64_t step = 0;
  std::filesystem::path path = {};
};
std::filesystem::path step_folder(const std::filesystem::path& folder, std::int64_t step);
// Where it is while it is written.
std::filesystem::path part_folder(const std::filesystem::path& folder, std::int64_t step);
// In ascending order; other names are left alone. Empty when the folder does not exist.
std::vector<StepFolder> step_folders(const std::filesystem::path& folder);

// A checkpoint while it is written, under another name (step_00000100.part); with several ranks, one
// makes it and all write into it. commit() gives it its own
// at once, in place of an older one of the same step; without it nothing is left. Throws Error{Io}.
class PendingCheckpoint {
public:
  PendingCheckpoint(const std::filesystem::path& folder, std::int64_t step); // removes what died half-written
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  ~PendingCheckpoint();

  const std::filesystem::path& path() const { return path_; }
  // Writes the manifest, then renames. Every other file must be durable by now.
  void commit(const Manifest& manifest);

private:
  std::filesystem::path path_, final_;
};

// The newest checkpoint that is whole, verified; `tell` gets a line for each one passed over. Empty when
// there is none; Error{Checkpoint} when there are some and none is whole.
std::optional<Reader> newest_whole(const std::filesystem::path& folder, const std::function<void(const std::string&)>& tell);

// Of the checkpoints up to `step`, removes all but the newest `count`. Each loses its name first: what is
// half removed is no checkpoint. Later ones (broken, to be written again) do not count.
void keep_newest(const std::filesystem::path& folder, std::int64_t count, std::int64_t step);

} // namespace gdn::trainer::checkpoint
