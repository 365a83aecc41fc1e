#include "trainer/checkpoint/items.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"
#include "trainer/checkpoint/hash.h"

namespace gdn::trainer::checkpoint {

namespace {

std::string sections_text(const TensorEntry& t) {
  std::string text;
  for (const auto& [name, size] : t.sections) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, size);
  return text;
}

} // namespace

std::vector<Item> items_of(const model::ParameterTable& table, const config::Parallel& parallel, const ShardRanks& ranks,
                           const std::function<bool(const model::Parameter&)>& held) {
  std::vector<Item> items;
  for (const model::Parameter& p : table.parameters)
    if (held(p))
      for (const char* state : kStates) items.push_back({state, &p, shard_of(p, parallel, ranks)});
  return items;
}

std::vector<Item> items_of(const model::ParameterTable& table) {
  return items_of(table, {}, {}, [](const model::Parameter&) { return true; });
}

FileEntry write_file(const std::filesystem::path& folder, std::int64_t rank, const std::vector<Item>& items,
                     const std::function<std::vector<float>(const Item&)>& get) {
  FileEntry entry{fmt::format("rank_{:05}.safetensors", rank), 0, {}};
  const std::filesystem::path path = folder / entry.file;
  std::vector<TensorInfo> tensors;
  for (const Item& i : items) {
    if (!i.write) continue;
    entry.pieces.push_back({i.state, i.parameter->name, i.shard, {}});
    const bool rectangle = i.shard.boxes.size() == 1 && i.shard.count == i.shard.boxes.front().elements();
    tensors.push_back({entry.pieces.back().key(), DType::FP32, rectangle ? i.shard.boxes.front().count : Shape{i.shard.count}});
  }
  std::optional<SafetensorsWriter> writer;
  std::optional<Error> failed; // the ranks that it shares parameters with still need its part of each
  auto unless_failed = [&](auto write) {
    try {
      if (!failed) write();
    } catch (const Error& e) {
      failed = e;
    }
  };
  if (!tensors.empty())
    unless_failed([&] { writer.emplace(path, std::move(tensors), Metadata{{"format", "gdn.checkpoint/1"}, {"manifest", kManifestFile}}); });
  size_t written = 0;
  for (const Item& i : items) {
    const std::vector<float> values = get(i);
    if (!i.write) continue;
    const auto bytes = std::as_bytes(std::span(values));
    entry.pieces[written].hash = hash_of(bytes);
    unless_failed([&] { writer->write(written, 0, bytes); });
    ++written;
  }
  if (failed) throw *failed;
  if (!writer) return entry;
  writer->commit();
  entry.bytes = static_cast<Bytes>(std::filesystem::file_size(path));
  return entry;
}

void require_same_tensors(const Reader& reader, const model::ParameterTable& table, std::int64_t vocab) {
  auto fail = [&](const std::string& message) {
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: {}", reader.folder().string(), message), "it is of another model; resume with the configuration it was trained with");
  };
  for (const model::Parameter& p : table.parameters) {
    const TensorEntry mine = entry_of(p), *saved = reader.manifest().find(p.name);
    if (!saved) fail(fmt::format("it has no parameter '{}'", p.name));
    const bool padded = p.rule() == model::ShardRule::Vocab && p.dim == 0 && saved->shape.size() == mine.shape.size() && saved->shape[0] >= vocab &&
                        std::equal(mine.shape.begin() + 1, mine.shape.end(), saved->shape.begin() + 1);
    if (padded) continue;
    if (saved->shape != mine.shape)
      fail(fmt::format("'{}' is [{}], this model has [{}]", p.name, fmt::join(saved->shape, ", "), fmt::join(mine.shape, ", ")));
    if (!(*saved == mine))
      fail(fmt::format("'{}' has sections {}, this model has {}", p.name, sections_text(*saved), sections_text(mine)));
  }
}

void read_items(Reader& reader, const std::vector<Item>& items, const std::function<void(const Item&, const std::vector<float>&)>& set) {
  for (const Item& i : items) set(i, reader.read(i.state, i.parameter->name, i.parameter->shape, i.shard));
}

} // namespace gdn::trainer::checkpoint
