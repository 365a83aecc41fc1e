#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/units.h"
#include "trainer/checkpoint/shard.h"

// checkpoint.json: what a checkpoint is of, and which file holds which part of every tensor. Written
// last, so a folder that has it is whole.
namespace gdn::trainer::checkpoint {

inline constexpr const char* kManifestFile = "checkpoint.json";

// The fp32 weight that the optimizer keeps, and its two moments.
inline constexpr const char* kStates[] = {"weight", "m", "v"};

// A tensor as the whole model has it: canonical name, shape, and the sections of one dimension.
struct TensorEntry {
  std::string name = {};
  Shape shape = {};
  int dim = 0;
  std::vector<std::pair<std::string, std::int64_t>> sections = {}; // name and size along `dim`, in order
  std::int64_t repeats = 0; // model::Parameter::repeats
  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};
TensorEntry entry_of(const model::Parameter& parameter);

// One tensor of a file: called "STATE.NAME" there, fp32, its elements in the order of `shard`.
struct PieceEntry {
  std::string state = {}, name = {};
  Shard shard = {};
  std::string hash = {};
  std::string key() const { return state + "." + name; }
};

struct FileEntry {
  std::string file = {}; // beside the manifest
  Bytes bytes = 0;
  std::vector<PieceEntry> pieces = {};
};

using Keys = std::vector<std::pair<std::string, std::string>>; // in the order of the configuration

struct Manifest {
  std::int64_t step = 0;          // steps done
  Keys model = {}, run = {}, train = {};
  std::string data = {};          // where tokens came from
  std::vector<TensorEntry> tensors = {};
  std::vector<FileEntry> files = {};

  const TensorEntry* find(std::string_view name) const; // nullptr when absent
};

std::string to_json(const Manifest& manifest);
// Error{Checkpoint} naming file, position and what is wrong: it is not a manifest, not of this format,
// has no sections, was changed after it was written, or names parts that its tensors do not have.
Manifest parse_manifest(const std::string& text, const std::string& file);

// A rank's share of `files`, as it travels to the rank that writes the manifest.
std::string to_json(const FileEntry& file);
FileEntry parse_file_entry(const std::string& text, const std::vector<TensorEntry>& tensors);

} // namespace gdn::trainer::checkpoint
