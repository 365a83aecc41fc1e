#include "trainer/checkpoint/run_checkpoints.h"

#include <algorithm>
#include <fstream>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "config/model_io.h"
#include "config/run_io.h"
#include "config/train.h"
#include "core/error.h"
#include "trainer/atomic_file.h"
#include "trainer/checkpoint/items.h"
#include "trainer/checkpoint/parameter_state.h"
#include "trainer/comm/launch.h"

namespace gdn::trainer::checkpoint {

namespace {

void flatten(const config::Node& node, const std::string& key, Keys& keys) {
  using Kind = config::Node::Kind;
  if (node.kind == Kind::Map) {
    for (const config::Entry& e : node.entries) flatten(e.value, key.empty() ? e.key : key + "." + e.key, keys);
  } else if (node.kind == Kind::List) {
    std::vector<std::string> items;
    for (const config::Node& n : node.items) items.push_back(n.text);
    keys.emplace_back(key, fmt::format("[{}]", fmt::join(items, ", ")));
  } else {
    keys.emplace_back(key, node.kind == Kind::Null ? "none" : node.text);
  }
}

Keys flat_keys_of(const config::Node& map) {
  Keys keys;
  flatten(map, "", keys);
  return keys;
}

// Calls `differs(key, before, now)` for every key whose value is not the same on both sides.
template <class F> void compare_keys(const Keys& before, const Keys& now, F differs) {
  auto value = [](const Keys& keys, const std::string& key) {
    const auto it = std::find_if(keys.begin(), keys.end(), [&](const auto& k) { return k.first == key; });
    return it == keys.end() ? std::string("not set") : it->second;
  };
  for (const auto& [key, text] : now)
    if (const std::string old = value(before, key); old != text) differs(key, old, text);
  for (const auto& [key, text] : before)
    if (value(now, key) == "not set") differs(key, text, std::string("not set"));
}

} // namespace

RunCheckpoints::RunCheckpoints(CheckpointOptions options, const Setup& setup, std::string data, const std::filesystem::path& output,
                               std::function<void(const std::string&)> tell)
    : options_(std::move(options)), folder_(options_.folder.empty() ? output / "checkpoints" : std::filesystem::path(options_.folder)),
      tell_(std::move(tell)) {
  identity_.model = flat_keys_of(config::to_node(setup.profile.model));
  identity_.run = flat_keys_of(config::to_node(setup.profile.run));
  identity_.train = flat_keys_of(config::to_node(setup.train));
  identity_.data = std::move(data);
  std::vector<int> everybody(static_cast<size_t>(this_world().size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  host_ = this_world().group(everybody);
}

// The checkpoint to start from into `source_`, verified.
void RunCheckpoints::choose() {
  const std::string& name = options_.resume;
  if (name.empty()) {
    if (const auto old = step_folders(folder_); options_.write && !old.empty())
      throw Error(ErrorCode::Config, fmt::format("{}: it holds checkpoints of another run, up to step {}", folder_.string(), old.back().step),
                  "--resume goes on from them; or name another folder with --checkpoint");
    return;
  }
  if (name == "latest") {
    source_ = newest_whole(folder_, tell_);
  } else {
    const bool step = name.find_first_not_of("0123456789") == std::string::npos && name.size() < 18;
    source_.emplace(step ? step_folder(folder_, std::stoll(name)) : std::filesystem::path(name));
    source_->verify();
    const auto others = step_folders(folder_);
    const std::int64_t from = source_->manifest().step, there = others.empty() ? 0 : others.back().step;
    std::error_code ignored;
    const bool own = std::filesystem::equivalent(source_->folder(), step_folder(folder_, from), ignored);
    if (options_.write && there >= from && !(own && there == from))
      throw Error(ErrorCode::Config, fmt::format("{}: it holds checkpoints up to step {}, and the one to resume from is of step {}", folder_.string(), there, from),
                  own ? "name another folder with --checkpoint, or remove the later ones"
                      : "--resume alone goes on from those; or name another folder with --checkpoint");
  }
  if (!source_) tell_(fmt::format("no checkpoint in {}: starting at step 1", folder_.string()));
}

std::int64_t RunCheckpoints::open(const Ranks& ranks) {
  if (ranks.rank() == 0) choose();
  const std::string chosen = gather_texts(*host_, source_ ? source_->folder().string() : "").front();
  if (chosen.empty()) return 0;
  if (ranks.rank() != 0) source_.emplace(chosen); // what it reads is verified then
  compare();
  const std::int64_t step = source_->manifest().step;
  tell_(fmt::format("resuming after step {} from {}", step, chosen));
  std::error_code ignored;
  if (std::filesystem::equivalent(source_->folder(), step_folder(folder_, step), ignored)) last_ = step;
  else started_from_ = chosen;
  return step;
}

void RunCheckpoints::compare() const {
  const Manifest& m = source_->manifest();
  compare_keys(m.model, identity_.model, [&](const std::string& key, const std::string& before, const std::string& now) {
    if (key == "name" || key == "source") return;
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: it is of another model: {} is {}, here {}", source_->folder().string(), key, before, now),
                "resume with the configuration it was trained with");
  });
  auto line = [&](const char* block) {
    return [this, block](const std::string& key, const std::string& before, const std::string& now) {
      if (key != "source") tell_(fmt::format("changed since the checkpoint: {}.{} was {}, is {}", block, key, before, now));
    };
  };
  compare_keys(m.run, identity_.run, line("run"));
  compare_keys(m.train, identity_.train, line("train"));
  if (m.data != identity_.data) tell_(fmt::format("changed since the checkpoint: the data was {}, is {}", m.data, identity_.data));
}

void RunCheckpoints::restore(Session& session) {
  if (!source_) return;
  Parameters& parameters = session.parameters();
  require_same_tensors(*source_, parameters.table(), session.model().vocab);
  read_items(*source_, items_of(parameters, session.ranks()), [&](const Item& item, const std::vector<float>& values) { set(parameters, item, values); });
  const std::int64_t step = source_->manifest().step;
  source_.reset(); // closes its files
  if (owes(step)) save(session, step);
}

void RunCheckpoints::after_step(Session& session, std::int64_t step) {
  if (options_.write && options_.every > 0 && step % options_.every == 0) save(session, step);
}

void RunCheckpoints::finish(Session& session, std::int64_t step) {
  if (owes(step)) save(session, step);
}

void RunCheckpoints::save(Session& session, std::int64_t step) {
  const Ranks& ranks = session.ranks();
  try {
    std::optional<PendingCheckpoint> pending;
    if (ranks.rank() == 0) pending.emplace(folder_, step);
    ranks.world().barrier();
    Parameters& parameters = session.parameters();
    FileEntry mine;
    std::string failure;
    try {
      mine = write_file(part_folder(folder_, step), ranks.rank(), items_of(parameters, ranks), [&](const Item& i) { return get(parameters, i); });
    } catch (const Error& e) {
      if (e.code() != ErrorCode::Io) throw;
      failure = e.what();
    }
    // A full disk may stop one rank only; together they leave nothing half-written behind.
    for (const std::string& text : gather_texts(*host_, failure))
      if (!text.empty()) throw Error(ErrorCode::Io, text);
    const std::vector<std::string> entries = gather_texts(*host_, to_json(mine)); // every file is durable now
    if (pending) {
      Manifest m = identity_;
      m.step = step;
      for (const model::Parameter& p : parameters.table().parameters) m.tensors.push_back(entry_of(p));
      for (const std::string& text : entries)
        if (FileEntry file = parse_file_entry(text, m.tensors); !file.pieces.empty()) m.files.push_back(std::move(file));
      pending->commit(m);
    }
    ranks.world().barrier();
  } catch (const Error& e) {
    if (e.code() != ErrorCode::Io) throw;
    throw Error(ErrorCode::Io, fmt::format("the checkpoint of step {} could not be written: {}", step, e.what()),
                last_ > 0               ? fmt::format("the one of step {} is whole: make room, then --resume", last_)
                : started_from_.empty() ? "no earlier checkpoint exists: make room, then start again"
                                        : fmt::format("make room, then --resume {}", started_from_));
  }
  last_ = step;
  if (options_.keep > 0 && ranks.rank() == 0) keep_newest(folder_, options_.keep, step);
}

void cut_log(const std::filesystem::path& log, std::int64_t step) {
  std::ifstream in(log);
  if (!in) return;
  std::string kept, line;
  while (std::getline(in, line)) {
    const nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
    if (j.is_object() && j.contains("step") && j["step"].is_number_integer() && j["step"].get<std::int64_t>() <= step) kept += line + "\n";
  }
  write_atomically(log, kept);
}

} // namespace gdn::trainer::checkpoint
