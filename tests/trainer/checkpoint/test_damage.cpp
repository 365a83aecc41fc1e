#include <doctest/doctest.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include <sys/resource.h>

#include "core/error.h"
#include "tests/temporary_folder.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/items.h"

// What writing leaves when it fails, and what reading says about damaged files.
using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::checkpoint;
namespace fs = std::filesystem;

namespace {

model::ParameterTable small_table() {
  model::ParameterTable table;
  for (auto [name, rows] : {std::pair{"layers.0.gdn.in_proj", 6}, {"final_norm", 3}}) {
    model::Parameter p;
    p.name = name;
    p.shape = {rows, 2};
    p.sections = {{"a", rows / 3, model::ShardRule::Column}, {"b", rows - rows / 3, model::ShardRule::Column}};
    table.parameters.push_back(p);
  }
  return table;
}

std::vector<float> values_of(const Item& i, std::int64_t step) {
  std::vector<float> v(static_cast<size_t>(i.shard.count));
  for (size_t e = 0; e < v.size(); ++e) v[e] = static_cast<float>(step) + static_cast<float>(e) / 16 + static_cast<float>(i.state[0]);
  return v;
}

void save(const fs::path& folder, std::int64_t step) {
  const model::ParameterTable table = small_table();
  PendingCheckpoint pending(folder, step);
  Manifest m;
  m.step = step;
  m.model = {{"hidden_size", "2"}};
  m.data = "none";
  for (const model::Parameter& p : table.parameters) m.tensors.push_back(entry_of(p));
  m.files.push_back(write_file(pending.path(), 0, items_of(table), [&](const Item& i) { return values_of(i, step); }));
  pending.commit(m);
}

bool is_whole(const fs::path& path, std::int64_t step) {
  const model::ParameterTable table = small_table();
  Reader reader(path);
  reader.verify();
  bool same = reader.manifest().step == step;
  read_items(reader, items_of(table), [&](const Item& i, const std::vector<float>& v) { same = same && v == values_of(i, step); });
  return same;
}

std::string refusal(const fs::path& path) {
  try {
    Reader reader(path);
    reader.verify();
  } catch (const Error& e) {
    CHECK((e.code() == ErrorCode::Checkpoint || e.code() == ErrorCode::Io));
    return e.what();
  }
  return {};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Files of this process may not grow past `bytes` while it lives: a full disk, byte by byte.
class FileSizeLimit {
public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

private:
  void (*handler_)(int);
  rlimit before_ = {};
};

} // namespace

TEST_CASE("checkpoint: writing that fails at any byte leaves the last one whole and nothing else") {
  test::TemporaryFolder folder;
  save(folder.path(), 1);
  const fs::path first = step_folder(folder.path(), 1);
  const auto weights = fs::file_size(first / "rank_00000.safetensors"), manifest = fs::file_size(first / kManifestFile);
  const auto most = std::max(weights, manifest);
  REQUIRE(manifest > weights);
  // Every byte of the tensor file; of the longer manifest every 16th, as each try costs a flush.
  for (std::uintmax_t k = 0; k <= most; k = k < weights ? k + 1 : k == most ? most + 1 : std::min(most, k + 16)) {
    bool threw = false;
    try {
      const FileSizeLimit limit(k);
      save(folder.path(), 2);
    } catch (const Error& e) {
      threw = true;
      CHECK(e.code() == ErrorCode::Io);
      CHECK(has(e.what(), "step_00000002.part/"));
      CHECK(has(e.what(), "File too large"));
    }
    CHECK(threw == (k < most));
    CHECK(is_whole(first, 1));
    std::vector<std::string> names;
    for (const fs::directory_entry& e : fs::directory_iterator(folder.path())) names.push_back(e.path().filename());
    if (threw) CHECK(names == std::vector<std::string>{"step_00000001"});
  }
  CHECK(is_whole(step_folder(folder.path(), 2), 2));
}

TEST_CASE("checkpoint: a step written again takes the place of the old one at once") {
  test::TemporaryFolder folder;
  save(folder.path(), 4);
  std::ofstream(step_folder(folder.path(), 4) / "rank_00000.safetensors") << "damaged";
  CHECK(!refusal(step_folder(folder.path(), 4)).empty());
  fs::create_directories(folder / "step_00000003.part/leftover"); // of a process that died
  save(folder.path(), 4);
  CHECK(is_whole(step_folder(folder.path(), 4), 4));
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("checkpoint: cut at any byte, changed at any byte: refused, with the file's name") {
  test::TemporaryFolder folder;
  save(folder.path(), 1);
  const fs::path path = step_folder(folder.path(), 1);
  for (const char* name : {"rank_00000.safetensors", kManifestFile}) {
    const std::string whole = test::read_bytes(path / name);
    int unseen = 0;
    for (size_t n = 0; n < whole.size(); ++n) {
      test::write_bytes(path / name, whole.substr(0, n));
      const std::string cut = refusal(path);
      const bool only_newline = whole[n] == '\n' && n + 1 == whole.size(); // after the manifest's last brace
      if (!only_newline) CHECK_MESSAGE(has(cut, name), "cut to " << n << ": " << cut);
      std::string changed = whole;
      changed[n] = static_cast<char>(changed[n] ^ 0x04);
      test::write_bytes(path / name, changed);
      const std::string why = refusal(path);
      if (why.empty()) ++unseen;
      else CHECK_MESSAGE(has(why, name), "byte " << n << ": " << why);
    }
    test::write_bytes(path / name, whole + "x");
    CHECK(has(refusal(path), name));
    test::write_bytes(path / name, whole);
    CHECK(refusal(path).empty());
    // What may change unseen: the free metadata of the tensor file, and space between words.
    MESSAGE(name, ": ", unseen, " of ", whole.size(), " changed bytes are unseen");
    CHECK(unseen <= (std::string(name) == kManifestFile ? 1 : 60));
  }
}

TEST_CASE("checkpoint: missing and foreign files") {
  test::TemporaryFolder folder;
  save(folder.path(), 1);
  save(folder.path(), 2);
  const fs::path one = step_folder(folder.path(), 1), two = step_folder(folder.path(), 2);
  CHECK(has(refusal(folder / "step_00000009"), "no such checkpoint"));
  fs::copy_file(two / "rank_00000.safetensors", one / "rank_00000.safetensors", fs::copy_options::overwrite_existing);
  CHECK(has(refusal(one), "was changed after it was written: its hash does not match"));
  fs::remove(one / "rank_00000.safetensors");
  CHECK(has(refusal(one), "rank_00000.safetensors: No such file"));
  fs::remove(one / kManifestFile);
  CHECK(has(refusal(one), "no checkpoint.json: the checkpoint was never finished"));
  test::write_bytes(one / kManifestFile, "{\"schema\": \"gdn.checkpoint/9\"}");
  CHECK(has(refusal(one), "schema 'gdn.checkpoint/9'; this program reads 'gdn.checkpoint/1'"));
  test::write_bytes(one / kManifestFile, "{\"step\": 1}");
  CHECK(has(refusal(one), "missing key"));
}

TEST_CASE("checkpoint: a manifest without sections, or with parts that its tensors do not have") {
  const model::ParameterTable table = small_table();
  Manifest m;
  m.data = "none";
  for (const model::Parameter& p : table.parameters) m.tensors.push_back(entry_of(p));
  auto refused = [](const Manifest& bad) {
    try {
      parse_manifest(to_json(bad), "checkpoint.json");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::Checkpoint);
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused(m).empty());
  Manifest bad = m;
  bad.tensors[0].sections.clear();
  CHECK(has(refused(bad), "the sections of 'layers.0.gdn.in_proj' add up to 0 rows"));
  bad = m;
  bad.tensors[0].sections[0].second += 1;
  CHECK(has(refused(bad), "add up to 7 rows"));
  FileEntry file{"rank_00000.safetensors", 8, {{"weight", "final_norm", whole({3, 2}), "00"}}};
  auto with = [&](auto change) {
    bad = m;
    FileEntry f = file;
    change(f);
    bad.files = {f};
    return refused(bad);
  };
  CHECK(with([](FileEntry&) {}).empty());
  CHECK(has(with([](FileEntry& f) { f.file = "../elsewhere"; }), "'../elsewhere' is no file name"));
  CHECK(has(with([](FileEntry& f) { f.pieces[0].name = "nothing"; }), "'nothing' is not among the tensors"));
  CHECK(has(with([](FileEntry& f) { f.pieces[0].state = "gradient"; }), "'gradient' is no state"));
  CHECK(has(with([](FileEntry& f) { f.pieces[0].shard.boxes[0].count[0] = 4; }), "'0:4,0:2' is no part"));
  CHECK(has(with([](FileEntry& f) { f.pieces[0].shard.count = 7; }), "7 elements from 0 of boxes that have 6"));
}

TEST_CASE("checkpoint: a part that no file holds") {
  const model::ParameterTable table = small_table();
  test::TemporaryFolder folder;
  config::Parallel parallel;
  parallel.tp = 3; // 6 = 2 + 4 rows do not divide; the whole is written by hand below
  PendingCheckpoint pending(folder.path(), 1);
  Manifest m;
  m.step = 1;
  m.data = "none";
  m.tensors = {entry_of(table.parameters[0])};
  Item half{"weight", &table.parameters[0], {{Box{{0, 0}, {3, 2}}}, 0, 6}};
  m.files.push_back(write_file(pending.path(), 0, {half}, [](const Item& i) { return values_of(i, 1); }));
  pending.commit(m);
  Reader reader(step_folder(folder.path(), 1));
  CHECK(reader.read("weight", "layers.0.gdn.in_proj", {6, 2}, {{Box{{0, 0}, {3, 2}}}, 0, 6}) == values_of(half, 1));
  CHECK_THROWS_WITH_AS(reader.read("weight", "layers.0.gdn.in_proj", {6, 2}, whole({6, 2})),
                       doctest::Contains("no file holds element 6 of 'weight.layers.0.gdn.in_proj'"), Error);
  CHECK_THROWS_WITH_AS(reader.read("m", "layers.0.gdn.in_proj", {6, 2}, whole({6, 2})), doctest::Contains("it has no 'm.layers.0.gdn.in_proj'"), Error);
}

TEST_CASE("checkpoint: the newest whole one is found, and none of several is an error") {
  test::TemporaryFolder folder;
  std::vector<std::string> lines;
  const auto tell = [&](const std::string& line) { lines.push_back(line); };
  CHECK(!newest_whole(folder / "nowhere", tell));
  CHECK(!newest_whole(folder.path(), tell));
  for (std::int64_t step : {1, 2, 3}) save(folder.path(), step);
  CHECK(newest_whole(folder.path(), tell)->manifest().step == 3);
  CHECK(lines.empty());
  fs::resize_file(step_folder(folder.path(), 3) / "rank_00000.safetensors", 40);
  fs::remove(step_folder(folder.path(), 2) / kManifestFile);
  CHECK(newest_whole(folder.path(), tell)->manifest().step == 1);
  REQUIRE(lines.size() == 2);
  CHECK(has(lines[0], "step_00000003/rank_00000.safetensors: 40 bytes"));
  CHECK(has(lines[0], "trying the one before"));
  CHECK(has(lines[1], "step_00000002: no checkpoint.json"));
  fs::remove_all(step_folder(folder.path(), 1) / "rank_00000.safetensors");
  CHECK_THROWS_WITH_AS(newest_whole(folder.path(), tell), doctest::Contains("none of its 3 checkpoints is whole"), Error);
}
