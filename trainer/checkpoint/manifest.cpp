#include "trainer/checkpoint/manifest.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "config/json.h"
#include "core/error.h"
#include "trainer/checkpoint/hash.h"

namespace gdn::trainer::checkpoint {

using config::Fields;
using config::Node;
using Json = nlohmann::ordered_json;

namespace {

constexpr const char* kSchema = "gdn.checkpoint/1";

std::string hash_of_text(std::string_view text) { return hash_of(std::as_bytes(std::span(text.data(), text.size()))); }

Json json_of(const Keys& keys) {
  Json map = Json::object();
  for (const auto& [key, value] : keys) map[key] = value;
  return map;
}

Json json_of(const FileEntry& file) {
  Json pieces = Json::array();
  for (const PieceEntry& p : file.pieces) {
    Json boxes = Json::array();
    for (const Box& b : p.shard.boxes) boxes.push_back(text_of(b));
    pieces.push_back({{"state", p.state}, {"tensor", p.name}, {"boxes", boxes}, {"first", p.shard.first}, {"count", p.shard.count},
                      {"hash", p.hash}});
  }
  return {{"file", file.file}, {"bytes", file.bytes}, {"pieces", pieces}};
}

Json json_of(const TensorEntry& t) {
  Json sections = Json::object();
  for (const auto& [name, size] : t.sections) sections[name] = size;
  return {{"name", t.name}, {"shape", t.shape}, {"dim", t.dim}, {"sections", sections}, {"repeats", t.repeats}};
}

Keys keys_of(const Node& map) {
  Keys keys;
  for (const config::Entry& e : map.entries) keys.emplace_back(e.key, config::as_string(e.value));
  return keys;
}

const Node& list_of(Fields& fields, const char* name) {
  static const Node empty;
  const Node* n = fields.require(name);
  if (!n) return empty; // done() says so
  if (n->kind != Node::Kind::List) n->fail("expected a list");
  return *n;
}

TensorEntry tensor_of(const Node& map) {
  TensorEntry t;
  Fields f(map);
  f.need("name", t.name);
  for (const Node& n : list_of(f, "shape").items) t.shape.push_back(config::as_int(n, 1));
  std::int64_t dim = 0;
  f.need("dim", dim, 0, std::max<std::int64_t>(0, static_cast<std::int64_t>(t.shape.size()) - 1));
  t.dim = static_cast<int>(dim);
  f.need("repeats", t.repeats, 0, std::numeric_limits<std::int64_t>::max());
  const Node* sections = f.require("sections");
  f.done();
  std::int64_t sum = 0;
  for (const config::Entry& e : sections->entries) {
    t.sections.emplace_back(e.key, config::as_int(e.value, 1));
    sum += t.sections.back().second;
  }
  if (t.sections.empty() || t.shape.empty() || sum != t.shape[static_cast<size_t>(t.dim)])
    sections->fail(fmt::format("the sections of '{}' add up to {} rows", t.name, sum));
  return t;
}

using Names = std::unordered_map<std::string_view, const TensorEntry*>;

PieceEntry piece_of(const Node& map, const Names& names) {
  PieceEntry p;
  Fields f(map);
  f.need("state", p.state);
  f.need("tensor", p.name);
  f.need("hash", p.hash);
  f.need("first", p.shard.first, 0, std::numeric_limits<std::int64_t>::max());
  f.need("count", p.shard.count, 0, std::numeric_limits<std::int64_t>::max());
  const Node& boxes = list_of(f, "boxes");
  f.done();
  if (std::find(std::begin(kStates), std::end(kStates), p.state) == std::end(kStates)) map.fail(fmt::format("'{}' is no state of a tensor", p.state));
  const auto tensor = names.find(p.name);
  if (tensor == names.end()) map.fail(fmt::format("'{}' is not among the tensors", p.name));
  std::int64_t elements = 0;
  for (const Node& n : boxes.items) {
    p.shard.boxes.push_back(parse_box(config::as_string(n), tensor->second->shape));
    elements = checked_add(elements, p.shard.boxes.back().elements());
  }
  if (p.shard.first > elements || p.shard.count > elements - p.shard.first)
    map.fail(fmt::format("{} elements from {} of boxes that have {}", p.shard.count, p.shard.first, elements));
  return p;
}

FileEntry file_of(const Node& map, const Names& names) {
  FileEntry file;
  Fields f(map);
  f.need("file", file.file);
  f.need("bytes", file.bytes, 0, std::numeric_limits<std::int64_t>::max());
  const Node& pieces = list_of(f, "pieces");
  f.done();
  if (file.file.empty() || file.file != std::filesystem::path(file.file).filename()) map.fail(fmt::format("'{}' is no file name", file.file));
  for (const Node& n : pieces.items) file.pieces.push_back(piece_of(n, names));
  return file;
}

Names names_of(const std::vector<TensorEntry>& tensors) {
  Names names;
  for (const TensorEntry& t : tensors) names.emplace(t.name, &t);
  return names;
}

// Everything that reading throws about a manifest is about a checkpoint.
template <class Read> auto reading(const std::string& file, Read read) {
  try {
    return read();
  } catch (const Error& e) {
    const std::string what = e.what();
    throw Error(ErrorCode::Checkpoint, what.rfind(file, 0) == 0 ? what : file + ": " + what, e.hint());
  }
}

} // namespace

TensorEntry entry_of(const model::Parameter& p) {
  TensorEntry t{p.name, p.shape, p.dim, {}, p.repeats};
  // Rows of a padded vocabulary depend on the parallelism: readers take what both sides have.
  for (const model::Section& s : p.sections) t.sections.emplace_back(s.name.empty() ? "rows" : s.name, s.size);
  return t;
}

const TensorEntry* Manifest::find(std::string_view name) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const TensorEntry& t) { return t.name == name; });
  return it == tensors.end() ? nullptr : &*it;
}

std::string to_json(const Manifest& m) {
  Json root{{"schema", kSchema}, {"step", m.step}, {"model", json_of(m.model)}, {"run", json_of(m.run)}, {"train", json_of(m.train)},
            {"data", m.data}, {"tensors", Json::array()}, {"files", Json::array()}};
  for (const TensorEntry& t : m.tensors) root["tensors"].push_back(json_of(t));
  for (const FileEntry& f : m.files) root["files"].push_back(json_of(f));
  const std::string hash = hash_of_text(root.dump(1));
  root["hash"] = hash;
  return root.dump(1) + "\n";
}

// The hash is the last entry: it is of the text that ended before it.
Manifest parse_manifest(const std::string& text, const std::string& file) {
  return reading(file, [&] {
    const Node root = config::parse_json(text, file);
    Manifest m;
    Fields f(root);
    std::string schema, hash;
    f.need("schema", schema);
    if (!schema.empty() && schema != kSchema)
      root.fail(fmt::format("schema '{}'; this program reads '{}'", schema, kSchema), "it was written by another version");
    f.need("step", m.step, 0, std::numeric_limits<std::int64_t>::max());
    const Node *model = f.require("model"), *run = f.require("run"), *train = f.require("train");
    f.need("data", m.data);
    const Node &tensors = list_of(f, "tensors"), &files = list_of(f, "files");
    f.need("hash", hash);
    f.done();
    const size_t end = text.rfind(",\n \"hash\"");
    if (end == std::string::npos || hash_of_text(text.substr(0, end) + "\n}") != hash)
      throw Error(ErrorCode::Checkpoint, fmt::format("{}: it was changed after it was written: its hash does not match", file),
                  "use an earlier checkpoint");
    m.model = keys_of(*model);
    m.run = keys_of(*run);
    m.train = keys_of(*train);
    for (const Node& n : tensors.items) m.tensors.push_back(tensor_of(n));
    const Names names = names_of(m.tensors);
    for (const Node& n : files.items) m.files.push_back(file_of(n, names));
    return m;
  });
}

std::string to_json(const FileEntry& file) { return json_of(file).dump(); }

FileEntry parse_file_entry(const std::string& text, const std::vector<TensorEntry>& tensors) {
  return reading("file entry", [&] { return file_of(config::parse_json(text, "file entry"), names_of(tensors)); });
}

} // namespace gdn::trainer::checkpoint
