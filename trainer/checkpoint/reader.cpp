#include "trainer/checkpoint/reader.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/checkpoint/hash.h"
#include "trainer/mapped_file.h"

namespace gdn::trainer::checkpoint {

namespace {

Error broken(std::string message) {
  return {ErrorCode::Checkpoint, std::move(message), "--resume takes the newest checkpoint that is whole; this one can be deleted"};
}

Manifest open_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kManifestFile;
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) throw Error(ErrorCode::Checkpoint, fmt::format("{}: no such checkpoint", folder.string()));
  if (!std::filesystem::exists(path, ignored))
    throw broken(fmt::format("{}: no {}: the checkpoint was never finished", folder.string(), kManifestFile));
  return parse_manifest(std::string(MappedFile(path).content()), path.string());
}

} // namespace

Reader::Reader(std::filesystem::path folder) : folder_(std::move(folder)), manifest_(open_manifest(folder_)), files_(manifest_.files.size()) {
  for (size_t f = 0; f < manifest_.files.size(); ++f)
    for (const PieceEntry& p : manifest_.files[f].pieces)
      sources_[p.key()].push_back({f, &p, extents(p.shard, manifest_.find(p.name)->shape)});
}

const SafetensorsFile& Reader::file(size_t index) {
  if (files_[index]) return *files_[index];
  const FileEntry& entry = manifest_.files[index];
  const std::filesystem::path path = folder_ / entry.file;
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw broken(fmt::format("{}: {}", path.string(), error.message()));
  if (static_cast<Bytes>(size) != entry.bytes)
    throw broken(fmt::format("{}: {} bytes, {} were written: the file is cut short or another one", path.string(), size, entry.bytes));
  auto opened = std::make_unique<SafetensorsFile>(path);
  for (const PieceEntry& p : entry.pieces) {
    const TensorInfo& t = opened->at(p.key());
    if (t.dtype != DType::FP32 || t.elements() != p.shard.count)
      throw broken(fmt::format("{}: '{}' has {} elements in {}, {} in fp32 were written", path.string(), p.key(), t.elements(),
                               name_of(t.dtype), p.shard.count));
  }
  files_[index] = std::move(opened);
  return *files_[index];
}

std::span<const std::byte> Reader::data(Source& s) {
  const SafetensorsFile& f = file(s.file);
  const std::span<const std::byte> bytes = f.data(f.at(s.piece->key()));
  if (!s.verified && hash_of(bytes) != s.piece->hash)
    throw broken(fmt::format("{}: '{}' was changed after it was written: its hash does not match", f.path().string(), s.piece->key()));
  s.verified = true;
  return bytes;
}

void Reader::verify() {
  for (auto& [key, sources] : sources_)
    for (Source& s : sources) data(s);
}

// Extents of both sides lie in the order of the tensor; pieces may overlap (copies agree).
std::vector<float> Reader::read(std::string_view state, std::string_view name, const Shape& shape, const Shard& shard) {
  const std::string key = fmt::format("{}.{}", state, name);
  const TensorEntry* saved = manifest_.find(name);
  const auto found = sources_.find(key);
  if (!saved || found == sources_.end())
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: it has no '{}'", folder_.string(), key), "it is of another model");
  const std::int64_t end = whole(saved->shape).count;
  std::vector<float> out(static_cast<size_t>(shard.count), 0.0f);
  for (const Extent& want : extents(shard, shape)) {
    const std::int64_t stop = std::min(want.global + want.count, end);
    for (std::int64_t at = want.global; at < stop;) {
      std::int64_t copied = 0;
      for (Source& s : found->second) {
        auto e = std::upper_bound(s.extents.begin(), s.extents.end(), at, [](std::int64_t g, const Extent& x) { return g < x.global; });
        if (e == s.extents.begin() || (--e)->global + e->count <= at) continue;
        copied = std::min(e->global + e->count, stop) - at;
        const std::span<const std::byte> bytes = data(s);
        std::memcpy(out.data() + want.local + (at - want.global), bytes.data() + (e->local + at - e->global) * 4, static_cast<size_t>(copied) * 4);
        break;
      }
      if (copied == 0)
        throw broken(fmt::format("{}: no file holds element {} of '{}' ({} files)", folder_.string(), at, key, manifest_.files.size()));
      at += copied;
    }
  }
  return out;
}

} // namespace gdn::trainer::checkpoint
