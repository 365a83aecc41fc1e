#include "config/train.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/error.h"

namespace gdn::config {

double Train::learning_rate(std::int64_t step) const {
  if (step <= warmup_steps) return lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (lr_decay == "constant" || steps <= warmup_steps + 1) return lr;
  const double done = static_cast<double>(step - warmup_steps - 1) / static_cast<double>(steps - warmup_steps - 1);
  const double share = lr_decay == "linear" ? 1 - done : 0.5 * (1 + std::cos(std::numbers::pi * std::min(1.0, done)));
  return min_lr + (lr - min_lr) * std::max(0.0, share);
}

namespace {

void read(Train& t, Fields& f) {
  constexpr std::int64_t kMany = std::numeric_limits<std::int32_t>::max();
  f.read("steps", t.steps, 1, kMany);
  auto seed = static_cast<std::int64_t>(t.seed);
  f.read("seed", seed, 0, std::numeric_limits<std::int64_t>::max());
  t.seed = static_cast<std::uint64_t>(seed);
  f.read("lr", t.lr, 0, 10);
  f.read("min_lr", t.min_lr, 0, 10);
  f.read("warmup_steps", t.warmup_steps, 0, kMany);
  if (const Node* n = f.find("lr_decay")) t.lr_decay = as_choice(*n, {"constant", "linear", "cosine"});
  f.read("weight_decay", t.weight_decay, 0, 10);
  f.read("beta1", t.beta1, 0, 1);
  f.read("beta2", t.beta2, 0, 1);
  f.read("eps", t.eps, 0, 1);
  f.read("clip_grad", t.clip_grad, 0, 1e9);
  if (const Node* n = f.find("data")) t.data = as_choice(*n, {"synthetic", "tokens", "text"});
  f.read("data_path", t.data_path);
  if (const Node* n = f.find("data_dtype")) t.data_dtype = as_choice(*n, {"uint16", "uint32"});
  f.read("eod_id", t.eod_id, -1, kMany);
  f.done();
}

} // namespace

Train read_train(const Node& map) {
  Train t;
  Fields fields(map);
  read(t, fields);
  return t;
}

void check_complete(const Train& t, const std::string& where) {
  auto fail = [&](const std::string& message, const std::string& hint) {
    throw Error(ErrorCode::Config, (where.empty() ? "train: " : where + ": train: ") + message, hint);
  };
  if (t.data != "synthetic" && t.data_path.empty()) fail("data = " + t.data + " needs data_path", "a relative path starts at the configuration file");
  if (t.data == "synthetic" && !t.data_path.empty()) fail("data_path is given, but data is synthetic", "set data to text or tokens");
  if (t.eod_id >= 0 && t.data != "tokens") fail("eod_id is given, but data is " + t.data, "it ends documents of data: tokens; blank lines end those of a text");
}

void apply(Train& train, const std::string& key, const std::string& value, const std::string& where) {
  Node map;
  map.kind = Node::Kind::Map;
  map.where = where;
  map.path = "train";
  map.entries.push_back({key, where, Node::scalar(value, where, "train." + key)});
  Fields fields(map);
  read(train, fields);
}

Node to_node(const Train& t) {
  Node out;
  out.kind = Node::Kind::Map;
  out.set("steps", number_node(t.steps));
  out.set("seed", number_node(static_cast<std::int64_t>(t.seed)));
  out.set("lr", number_node(t.lr));
  out.set("min_lr", number_node(t.min_lr));
  out.set("warmup_steps", number_node(t.warmup_steps));
  out.set("lr_decay", string_node(t.lr_decay));
  out.set("weight_decay", number_node(t.weight_decay));
  out.set("beta1", number_node(t.beta1));
  out.set("beta2", number_node(t.beta2));
  out.set("eps", number_node(t.eps));
  out.set("clip_grad", number_node(t.clip_grad));
  out.set("data", string_node(t.data));
  if (!t.data_path.empty()) out.set("data_path", string_node(t.data_path));
  if (t.data == "tokens") out.set("data_dtype", string_node(t.data_dtype));
  if (t.eod_id >= 0) out.set("eod_id", number_node(t.eod_id));
  return out;
}

} // namespace gdn::config
