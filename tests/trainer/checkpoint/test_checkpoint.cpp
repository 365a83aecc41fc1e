#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "core/error.h"
#include "engine/fixture.h"
#include "shards.h"
#include "tests/temporary_folder.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/run_checkpoints.h"
#include "trainer/checkpoint/parameter_state.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::checkpoint;
namespace fs = std::filesystem;

namespace {

const auto kAll = [](const model::Parameter&) { return true; };

// State of a whole model: (state, parameter) -> elements.
using Values = std::map<std::pair<std::string, std::string>, std::vector<float>>;

Values values_of(Parameters& parameters) {
  Values v;
  for (const Item& i : items_of(parameters.table())) v[{i.state, i.parameter->name}] = get(parameters, i);
  return v;
}

// Writes `values` as the ranks of a topology would; elements are picked one by one.
fs::path write_as(const fs::path& folder, std::int64_t step, const model::ParameterTable& table, const std::vector<test::ParallelRank>& ranks,
                  const Values& values) {
  PendingCheckpoint pending(folder, step);
  Manifest m;
  m.step = step;
  m.data = "none";
  for (const model::Parameter& p : table.parameters) m.tensors.push_back(entry_of(p));
  for (size_t r = 0; r < ranks.size(); ++r) {
    const std::vector<Item> items = items_of(table, ranks[r].parallel, ranks[r].ranks, kAll);
    m.files.push_back(write_file(pending.path(), static_cast<std::int64_t>(r), items, [&](const Item& i) {
      std::vector<float> mine;
      for (std::int64_t e : test::held_by(*i.parameter, ranks[r])) mine.push_back(values.at({i.state, i.parameter->name})[static_cast<size_t>(e)]);
      return mine;
    }));
    m.files.back() = parse_file_entry(to_json(m.files.back()), m.tensors); // as it travels between ranks
  }
  pending.commit(m);
  return step_folder(folder, step);
}

// Reads a checkpoint as the ranks of another topology and puts the whole together again.
Values read_as(const fs::path& path, const model::ParameterTable& table, const std::vector<test::ParallelRank>& ranks) {
  Values all;
  Reader reader(path);
  reader.verify();
  for (const model::Parameter& p : table.parameters)
    for (const char* state : kStates) all[{state, p.name}].assign(static_cast<size_t>(p.elements()), -1.0f);
  for (const test::ParallelRank& r : ranks)
    read_items(reader, items_of(table, r.parallel, r.ranks, kAll), [&](const Item& i, const std::vector<float>& mine) {
      const std::vector<std::int64_t> held = test::held_by(*i.parameter, r);
      REQUIRE(held.size() == mine.size());
      for (size_t e = 0; e < held.size(); ++e) all[{i.state, i.parameter->name}][static_cast<size_t>(held[e])] = mine[e];
    });
  return all;
}

struct Trained {
  config::Model model = fixture::hybrid();
  config::Run run = fixture::run(2);
  CpuDevice device;
  Session session{model, run, device};
  explicit Trained(int steps, const char* stack = "native") : Trained(steps, [&] {
    config::Run r = fixture::run(2);
    r.stack = stack;
    return r;
  }()) {}
  Trained(int steps, const config::Run& r) : run(r), session(model, run, device) {
    session.use({});
    session.parameters().initialise(7);
    for (int s = 0; s < steps; ++s) {
      session.run(fixture::batches(model, run, static_cast<std::uint64_t>(s)));
      session.parameters().update({.lr = 1e-2, .weight_decay = 0.1, .step = s + 1});
    }
  }
};

void restore(Session& session, const fs::path& path) {
  Reader reader(path);
  require_same_tensors(reader, session.parameters().table(), session.model().vocab);
  read_items(reader, items_of(session.parameters().table()), [&](const Item& i, const std::vector<float>& v) { set(session.parameters(), i, v); });
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Checkpoint);
    return e.what();
  }
  return "no error";
}

} // namespace

TEST_CASE("checkpoint: TP 1 -> TP 2 -> EP 2 -> TP 2, EP 2, ETP 2 -> one rank: nothing changes") {
  test::TemporaryFolder folder;
  Trained run(2);
  const model::ParameterTable& table = run.session.parameters().table();
  const Values original = values_of(run.session.parameters());
  CHECK(original.size() == 3 * table.parameters.size());
  Values now = original;
  const std::vector<test::ParallelRank> hops[] = {test::ranks_of(1, 1, 1), test::ranks_of(2, 1, 1), test::ranks_of(1, 2, 1), test::ranks_of(2, 2, 2),
                                                  test::ranks_of(1, 1, 1)};
  for (size_t h = 0; h + 1 < std::size(hops); ++h) {
    const fs::path path = write_as(folder.path(), static_cast<std::int64_t>(h) + 1, table, hops[h], now);
    now = read_as(path, table, hops[h + 1]);
    CHECK(now == original); // bit by bit: no NaN here
  }

  // The last one, on one rank of a new session: the same forward output, and the next step the same too.
  const fs::path last = write_as(folder.path(), 9, table, hops[3], now);
  Trained other(0);
  restore(other.session, last);
  CHECK(values_of(other.session.parameters()) == original);
  const std::vector<Batch> batches = fixture::batches(run.model, run.run, 5);
  const fixture::Outcome a = fixture::outcome(run.session, batches), b = fixture::outcome(other.session, batches);
  CHECK(a.result.loss == b.result.loss);
  CHECK(a.gradients == b.gradients);
  for (Session* s : {&run.session, &other.session}) s->parameters().update({.lr = 1e-2, .step = 3});
  CHECK(values_of(run.session.parameters()) == values_of(other.session.parameters()));
}

TEST_CASE("checkpoint: the other stack takes the same tensors") {
  test::TemporaryFolder folder;
  for (auto [from, to] : {std::pair{"native", "megatron"}, {"megatron", "native"}}) {
    Trained a(2, from), b(0, to);
    const fs::path path = write_as(folder.path(), 1, a.session.parameters().table(), test::ranks_of(2, 1, 1), values_of(a.session.parameters()));
    restore(b.session, path);
    CHECK(values_of(a.session.parameters()) == values_of(b.session.parameters()));
    const std::vector<Batch> batches = fixture::batches(a.model, a.run, 5);
    CHECK(a.session.run(batches).loss == doctest::Approx(b.session.run(batches).loss).epsilon(2e-3)); // bf16
  }
}

TEST_CASE("checkpoint: a vocabulary padded for another TP") {
  test::TemporaryFolder folder;
  Trained a(1);
  config::Run wide = a.run;
  wide.vocab_divisor = 320; // the fixture's 128 rows, in 320
  Trained b(0, wide);
  const fs::path path = write_as(folder.path(), 1, a.session.parameters().table(), test::ranks_of(2, 1, 1), values_of(a.session.parameters()));
  restore(b.session, path);
  const std::vector<float> saved = a.session.parameters().weights("embedding.word"), loaded = b.session.parameters().weights("embedding.word");
  REQUIRE(loaded.size() == saved.size() / 128 * 320);
  CHECK(std::equal(saved.begin(), saved.end(), loaded.begin()));
  CHECK(std::all_of(loaded.begin() + static_cast<std::ptrdiff_t>(saved.size()), loaded.end(), [](float x) { return x == 0; }));
  // And back: the padding goes.
  restore(a.session, write_as(folder.path(), 2, b.session.parameters().table(), test::ranks_of(1, 1, 1), values_of(b.session.parameters())));
  CHECK(a.session.parameters().weights("embedding.word") == saved);
}

TEST_CASE("checkpoint: another model is refused by name") {
  test::TemporaryFolder folder;
  Trained a(0);
  const fs::path path = write_as(folder.path(), 1, a.session.parameters().table(), test::ranks_of(1, 1, 1), values_of(a.session.parameters()));
  auto refused = [&](auto change) {
    config::Model m = fixture::hybrid();
    change(m);
    const model::ParameterTable table = model::parameter_table(m, fixture::run());
    return message_of([&] { require_same_tensors(Reader(path), table, m.vocab); });
  };
  auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  CHECK(refused([](config::Model&) {}) == "no error");
  const std::string deeper = refused([](config::Model& m) {
    m.mixers.push_back(config::LayerKind::Gdn);
    m.mlps.push_back(config::MlpKind::Dense);
  });
  CHECK(has(deeper, "it has no parameter 'layers.3."));
  const std::string wider = refused([](config::Model& m) { m.moe.ffn = 32; });
  CHECK(has(wider, "'layers.0.moe.experts.fc1' is [4, 32, 32], this model has [4, 64, 32]"));
  const std::string more_words = refused([](config::Model& m) { m.vocab = 1000; });
  CHECK(has(more_words, "'embedding.word' is [128, 32], this model has [1024, 32]"));
}

TEST_CASE("checkpoint: sections that differ under one shape are refused") {
  model::ParameterTable saved, mine;
  model::Parameter p;
  p.name = "layers.0.gdn.in_proj";
  p.shape = {8, 1};
  p.sections = {{"q", 2, model::ShardRule::Column}, {"k", 2, model::ShardRule::Column}, {"v", 4, model::ShardRule::Column}};
  saved.parameters = {p};
  p.sections[0].size = 1;
  p.sections[1].size = 3;
  mine.parameters = {p};
  test::TemporaryFolder folder;
  Values values;
  for (const char* state : kStates) values[{state, p.name}] = {1, 2, 3, 4, 5, 6, 7, 8};
  const fs::path path = write_as(folder.path(), 1, saved, test::ranks_of(1, 1, 1), values);
  CHECK(message_of([&] { require_same_tensors(Reader(path), saved, 1); }) == "no error");
  CHECK(message_of([&] { require_same_tensors(Reader(path), mine, 1); }).find("has sections q 2, k 2, v 4, this model has q 1, k 3, v 4") != std::string::npos);
}

TEST_CASE("checkpoint: the newest n stay, later ones are not counted, other names are left alone") {
  test::TemporaryFolder folder;
  for (std::int64_t s : {1, 2, 3, 10, 100000000}) fs::create_directory(step_folder(folder.path(), s));
  for (const char* other : {"step_1", "step_00000004.old", "step_0000000x", "notes"}) fs::create_directory(folder / other);
  auto steps = [&] {
    std::vector<std::int64_t> found;
    for (const StepFolder& f : step_folders(folder.path())) found.push_back(f.step);
    return found;
  };
  CHECK(steps() == std::vector<std::int64_t>{1, 2, 3, 10, 100000000});
  keep_newest(folder.path(), 2, 10);
  CHECK(steps() == std::vector<std::int64_t>{3, 10, 100000000});
  keep_newest(folder.path(), 2, 10);
  CHECK(steps() == std::vector<std::int64_t>{3, 10, 100000000});
  for (const char* other : {"step_1", "step_00000004.old", "step_0000000x", "notes"}) CHECK(fs::exists(folder / other));
}

TEST_CASE("checkpoint: a log is cut after a step, and a torn line goes") {
  test::TemporaryFolder folder;
  const fs::path log = folder / "log.jsonl";
  cut_log(log, 3); // none there: fine
  CHECK(!fs::exists(log));
  std::ofstream(log) << "{\"step\":1}\n{\"step\":2,\"loss\":0.5}\n{\"step\":3}\n{\"step\":4}\n{\"st";
  cut_log(log, 2);
  CHECK(test::read_bytes(log) == "{\"step\":1}\n{\"step\":2,\"loss\":0.5}\n");
}
