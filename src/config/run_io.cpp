#include "config/run_io.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::config {

namespace {

std::vector<std::string> allowed_keys() {
  std::vector<std::string> out;
  for (const RunKey& k : run_keys())
    if (!k.setting) out.emplace_back(k.name);
  out.emplace_back("settings");
  return out;
}

std::vector<std::string> allowed_settings() {
  std::vector<std::string> out;
  for (const RunKey& k : run_keys())
    if (k.setting) out.emplace_back(k.name);
  return out;
}

} // namespace

const RunKey* find_run_key(std::string_view name) {
  constexpr std::string_view kPrefix = "settings.";
  bool setting = name.starts_with(kPrefix);
  if (setting) name.remove_prefix(kPrefix.size());
  for (const RunKey& k : run_keys())
    if (k.name == name && (k.setting || !setting)) return &k;
  return nullptr;
}

void apply(Run& run, std::string_view key, const Node& value) {
  const RunKey* k = find_run_key(key);
  if (!k) {
    std::vector<std::string> allowed = allowed_keys(), settings = allowed_settings();
    allowed.insert(allowed.end(), settings.begin(), settings.end());
    fail_unknown_key({std::string(key), value.where, {}}, "", allowed);
  }
  try {
    k->set(run, value);
  } catch (const Error& e) {
    throw Error(e.code(), e.what(), e.hint().empty() ? fmt::format("{}: {}", k->name, k->allowed) : e.hint());
  }
}

void apply(Run& run, std::string_view key, std::string_view value, const std::string& where) {
  Node node = Node::scalar(std::string(value), where, std::string(key));
  if (value.empty()) node.kind = Node::Kind::Null;
  apply(run, key, node);
}

void apply(Run& run, const Node& map) {
  if (map.kind == Node::Kind::Null) return; // "run:" with nothing under it
  Fields check(map);                        // throws unless a map
  for (const Entry& e : map.entries) {
    if (e.key == "settings") {
      Fields nested(e.value);
      for (const Entry& s : e.value.entries) {
        const RunKey* k = find_run_key(s.key);
        if (!k || !k->setting) fail_unknown_key(s, e.value.path, allowed_settings());
        apply(run, s.key, s.value);
      }
    } else if (find_run_key(e.key)) {
      apply(run, e.key, e.value);
    } else {
      fail_unknown_key(e, map.path, allowed_keys());
    }
  }
}

Node to_node(const Run& run) {
  Node out, settings;
  out.kind = settings.kind = Node::Kind::Map;
  for (const RunKey& k : run_keys()) (k.setting ? settings : out).set(std::string(k.name), k.get(run));
  out.set("settings", settings);
  return out;
}

namespace {

// Layout grammar: stages separated by '|', letters, "x*N" repeats a letter or a group "(...)".
class LayoutParser {
public:
  LayoutParser(const Node& node) : node_(node) {
    for (char c : node.text)
      if (c != ',' && c != ' ') text_ += c;
  }

  std::vector<std::int64_t> parse() {
    std::string flat = sequence(0);
    if (at_ != text_.size()) fail("unbalanced ')'");
    std::vector<std::int64_t> stages{0};
    for (char c : flat) {
      if (c == '|') stages.push_back(0);
      else if (c == 't') ++stages.back();
    }
    return stages;
  }

private:
  static constexpr std::size_t kMaxLength = 1 << 16;

  [[noreturn]] void fail(const std::string& why) const {
    node_.fail(fmt::format("layout '{}': {}", node_.text.substr(0, 100), why),
               "E embedding, t decoder layer, m MTP layer, L loss, | next stage, x*N and (...)*N repeat");
  }

  std::string sequence(int depth) {
    if (depth > 8) fail("nested too deeply");
    std::string out;
    while (at_ < text_.size() && text_[at_] != ')') {
      char c = text_[at_++];
      std::string unit(1, c);
      if (c == '(') {
        unit = sequence(depth + 1);
        if (at_ >= text_.size()) fail("unbalanced '('");
        ++at_; // ')'
      } else if (std::string_view("EtmL|").find(c) == std::string_view::npos) {
        fail(fmt::format("unknown letter '{}'", c));
      }
      std::int64_t times = 1;
      if (at_ < text_.size() && text_[at_] == '*') {
        std::size_t begin = ++at_;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
        times = as_int(Node::scalar(text_.substr(begin, at_ - begin), node_.where, node_.path), 1, 4096);
      }
      if (out.size() + unit.size() * static_cast<std::size_t>(times) > kMaxLength) fail("is too long");
      for (std::int64_t i = 0; i < times; ++i) out += unit;
    }
    return out;
  }

  const Node& node_;
  std::string text_ = {};
  std::size_t at_ = 0;
};

} // namespace

std::vector<std::int64_t> parse_layout(const Node& value) {
  bool letters = value.kind == Node::Kind::Scalar &&
                 value.text.find_first_of("EtmL|") != std::string::npos;
  return letters ? LayoutParser(value).parse() : as_ints(value, 0, 4096);
}

void resolve_layout(Run& run, std::int64_t layers) {
  Parallel& p = run.parallel;
  auto fail = [](const std::string& what, const std::string& hint = {}) {
    throw Error(ErrorCode::Config, what, hint);
  };
  if (p.first_stage_layers || p.last_stage_layers) {
    if (!p.layout.empty())
      fail("pipeline_model_parallel_layout excludes decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers");
    std::int64_t first = p.first_stage_layers.value_or(0), last = p.last_stage_layers.value_or(0);
    std::int64_t given = (p.first_stage_layers ? 1 : 0) + (p.last_stage_layers ? 1 : 0);
    std::int64_t middle_stages = p.pp - given, middle = layers - first - last;
    if (middle_stages < 0) fail("a first and a last stage need pipeline_model_parallel_size >= 2");
    if (middle < 0 || (middle_stages == 0 && middle != 0) ||
        (middle_stages > 0 && middle % (middle_stages * p.vp) != 0))
      fail(fmt::format("{} layers: {} in the first and {} in the last stage leave {}, which do not divide over "
                       "{} stages of {} chunks", layers, first, last, middle, middle_stages, p.vp));
    if (first % p.vp != 0 || last % p.vp != 0)
      fail(fmt::format("decoder_first/last_pipeline_num_layers ({}, {}) must be multiples of "
                       "virtual_pipeline_model_parallel_size {}", first, last, p.vp));
    for (std::int64_t chunk = 0; chunk < p.vp; ++chunk)
      for (std::int64_t stage = 0; stage < p.pp; ++stage) {
        bool is_first = stage == 0 && p.first_stage_layers, is_last = stage == p.pp - 1 && p.last_stage_layers;
        p.layout.push_back((is_first ? first : is_last ? last : middle / middle_stages) / p.vp);
      }
    p.first_stage_layers.reset(); // the layout now says it
    p.last_stage_layers.reset();
    return;
  }
  if (p.layout.empty()) return;
  if (static_cast<std::int64_t>(p.layout.size()) % p.pp != 0)
    fail(fmt::format("pipeline_model_parallel_layout has {} stages, not a multiple of pipeline_model_parallel_size {}",
                     p.layout.size(), p.pp));
  p.vp = static_cast<std::int64_t>(p.layout.size()) / p.pp; // as Megatron-LM derives it
  std::int64_t sum = std::accumulate(p.layout.begin(), p.layout.end(), std::int64_t{0});
  if (sum != layers)
    fail(fmt::format("pipeline_model_parallel_layout [{}] has {} layers, the model {}", fmt::join(p.layout, ", "), sum, layers));
}

} // namespace gdn::config
