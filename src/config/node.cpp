#include "config/node.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::config {

namespace {

// What a message shows of a value: one line, no control characters, not a whole file.
std::string shown(const Node& node) {
  switch (node.kind) {
  case Node::Kind::Null: return "nothing";
  case Node::Kind::List: return "a list";
  case Node::Kind::Map: return "a map";
  case Node::Kind::Scalar: break;
  }
  std::string out;
  for (char c : node.text.substr(0, 60)) out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  if (node.text.size() > 60) out += "...";
  return fmt::format("{} '{}'", node.quoted ? "the string" : "", out).substr(node.quoted ? 0 : 1);
}

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

bool has_leading_zero(std::string_view digits) {
  if (!digits.empty() && digits[0] == '-') digits.remove_prefix(1);
  return digits.size() > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9';
}

} // namespace

Node Node::scalar(std::string text, std::string where, std::string path) {
  Node n;
  n.kind = Kind::Scalar;
  n.text = std::move(text);
  n.where = std::move(where);
  n.path = std::move(path);
  return n;
}

const Node* Node::find(std::string_view key) const {
  for (const Entry& e : entries)
    if (e.key == key) return &e.value;
  return nullptr;
}

Node& Node::set(std::string key, Node value) {
  kind = Kind::Map;
  for (Entry& e : entries)
    if (e.key == key) {
      e.where = value.where;
      return e.value = std::move(value);
    }
  std::string at = value.where;
  entries.push_back({std::move(key), std::move(at), std::move(value)});
  return entries.back().value;
}

void Node::erase(std::string_view key) {
  std::erase_if(entries, [&](const Entry& e) { return e.key == key; });
}

std::string Node::prefix() const {
  std::string out = where;
  if (!out.empty()) out += ": ";
  if (!path.empty()) out += path + ": ";
  return out;
}

void Node::fail(const std::string& message, const std::string& hint) const {
  throw Error(ErrorCode::Config, prefix() + message, hint);
}

std::int64_t as_int(const Node& node, std::int64_t lowest, std::int64_t highest) {
  auto expected = [&] {
    if (highest == std::numeric_limits<std::int64_t>::max())
      return lowest == std::numeric_limits<std::int64_t>::min()
                 ? std::string("an integer")
                 : fmt::format("an integer of at least {}", lowest);
    return fmt::format("an integer from {} to {}", lowest, highest);
  };
  if (node.kind != Node::Kind::Scalar || node.quoted)
    node.fail(fmt::format("expected {}, got {}", expected(), shown(node)));
  const std::string& t = node.text;
  if (has_leading_zero(t))
    node.fail(fmt::format("expected {}, got '{}': leading zeros are refused because some readers "
                          "take them for octal", expected(), t.substr(0, 60)));
  std::int64_t value = 0;
  auto [end, ec] = std::from_chars(t.data(), t.data() + t.size(), value);
  bool all_read = end == t.data() + t.size();
  if (ec == std::errc::result_out_of_range && all_read)
    node.fail(fmt::format("expected {}, got '{}', which does not fit in 64 bits", expected(),
                          t.substr(0, 60)));
  if (ec != std::errc{} || !all_read)
    node.fail(fmt::format("expected {}, got {}", expected(), shown(node)));
  if (value < lowest || value > highest)
    node.fail(fmt::format("expected {}, got {}", expected(), value));
  return value;
}

double as_double(const Node& node, double lowest, double highest) {
  std::string expected = std::isinf(highest)
                             ? (std::isinf(lowest) ? "a number" : fmt::format("a number of at least {}", lowest))
                             : fmt::format("a number from {} to {}", lowest, highest);
  if (node.kind != Node::Kind::Scalar || node.quoted || has_leading_zero(node.text))
    node.fail(fmt::format("expected {}, got {}", expected, shown(node)));
  double value = 0;
  const char* last = node.text.data() + node.text.size();
  auto [end, ec] = std::from_chars(node.text.data(), last, value);
  if (ec != std::errc{} || end != last || !std::isfinite(value) || value < lowest || value > highest)
    node.fail(fmt::format("expected {}, got {}", expected, shown(node)));
  return value;
}

bool as_bool(const Node& node) {
  if (node.kind == Node::Kind::Scalar && !node.quoted) {
    if (node.text == "true") return true;
    if (node.text == "false") return false;
  }
  node.fail(fmt::format("expected true or false, got {}", shown(node)));
}

std::string as_string(const Node& node) {
  if (node.kind != Node::Kind::Scalar)
    node.fail(fmt::format("expected a text, got {}", shown(node)));
  return node.text;
}

std::string as_choice(const Node& node, const std::vector<std::string>& allowed) {
  if (node.kind == Node::Kind::Scalar) {
    if (std::find(allowed.begin(), allowed.end(), node.text) != allowed.end()) return node.text;
    node.fail(fmt::format("unknown value {}{}", shown(node), did_you_mean(node.text, allowed)),
              fmt::format("allowed: {}", fmt::join(allowed, ", ")));
  }
  node.fail(fmt::format("expected one of {}; got {}", fmt::join(allowed, ", "), shown(node)));
}

std::vector<std::string> as_strings(const Node& node) {
  std::vector<std::string> out;
  if (node.kind == Node::Kind::List) {
    for (const Node& item : node.items) out.push_back(as_string(item));
    return out;
  }
  if (node.kind != Node::Kind::Scalar)
    node.fail(fmt::format("expected a list, got {}", shown(node)));
  std::string_view t = node.text;
  while (!t.empty() && is_space(t.front())) t.remove_prefix(1);
  while (!t.empty() && is_space(t.back())) t.remove_suffix(1);
  if (t.size() >= 2 && t.front() == '[' && t.back() == ']') t = t.substr(1, t.size() - 2);
  std::string word;
  char quote = 0;
  auto flush = [&] {
    if (!word.empty()) out.push_back(std::move(word));
    word.clear();
  };
  for (char c : t) {
    if (c == quote) quote = 0;
    else if (quote == 0 && (c == '"' || c == '\'')) quote = c;
    else if (quote == 0 && (c == ',' || is_space(c))) flush();
    else word += c;
  }
  if (quote != 0) node.fail(fmt::format("a quotation mark {} is not closed", quote));
  flush();
  return out;
}

std::vector<std::int64_t> as_ints(const Node& node, std::int64_t lowest, std::int64_t highest) {
  std::vector<std::int64_t> out;
  if (node.kind == Node::Kind::List) {
    for (const Node& item : node.items) out.push_back(as_int(item, lowest, highest));
    return out;
  }
  for (std::string& word : as_strings(node))
    out.push_back(as_int(Node::scalar(std::move(word), node.where, node.path), lowest, highest));
  return out;
}

bool is_none(const Node& node) {
  if (node.kind == Node::Kind::Null) return true;
  return node.kind == Node::Kind::Scalar && !node.quoted &&
         (node.text == "null" || node.text == "none" || node.text == "None" || node.text == "~");
}

void fail_unknown_key(const Entry& entry, const std::string& path,
                      const std::vector<std::string>& allowed) {
  Node at;
  at.where = entry.where;
  at.path = path;
  at.fail(fmt::format("unknown key '{}'{}", entry.key.substr(0, 100), did_you_mean(entry.key.substr(0, 100), allowed)),
          fmt::format("allowed: {}", fmt::join(allowed, ", ")));
}

Fields::Fields(const Node& map) : map_(map) {
  if (map.kind != Node::Kind::Map) map.fail(fmt::format("expected a map of keys, got {}", shown(map)));
}

const Node* Fields::find(std::string_view key) {
  known_.emplace_back(key);
  return map_.find(key);
}

const Node* Fields::require(std::string_view key) {
  const Node* node = find(key);
  if (!node) missing_.emplace_back(key);
  return node;
}

void Fields::read(std::string_view key, std::int64_t& out, std::int64_t lowest, std::int64_t highest) {
  if (const Node* n = find(key)) out = as_int(*n, lowest, highest);
}

void Fields::read(std::string_view key, double& out, double lowest, double highest) {
  if (const Node* n = find(key)) out = as_double(*n, lowest, highest);
}

void Fields::read(std::string_view key, bool& out) {
  if (const Node* n = find(key)) out = as_bool(*n);
}

void Fields::read(std::string_view key, std::string& out) {
  if (const Node* n = find(key)) out = as_string(*n);
}

void Fields::need(std::string_view key, std::int64_t& out, std::int64_t lowest, std::int64_t highest) {
  if (const Node* n = require(key)) out = as_int(*n, lowest, highest);
}

void Fields::need(std::string_view key, std::string& out) {
  if (const Node* n = require(key)) out = as_string(*n);
}

void Fields::done() const {
  for (const Entry& e : map_.entries)
    if (std::find(known_.begin(), known_.end(), e.key) == known_.end())
      fail_unknown_key(e, map_.path, known_);
  if (!missing_.empty())
    map_.fail(fmt::format("missing key{} {}", missing_.size() > 1 ? "s" : "", fmt::join(missing_, ", ")));
}

Node number_node(std::int64_t value) { return Node::scalar(fmt::format("{}", value)); }
Node number_node(double value) { return Node::scalar(fmt::format("{}", value)); }
Node bool_node(bool value) { return Node::scalar(value ? "true" : "false"); }

Node string_node(std::string value) {
  Node n = Node::scalar(std::move(value));
  // Plain words are safe; anything that a reader could take for a number, a boolean, null or syntax
  // is written as a quoted string.
  auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.' || c == '+' || c == '/';
  };
  bool starts_with_letter = !n.text.empty() && ((n.text[0] >= 'a' && n.text[0] <= 'z') ||
                                                (n.text[0] >= 'A' && n.text[0] <= 'Z'));
  n.quoted = !starts_with_letter || !std::all_of(n.text.begin(), n.text.end(), plain) ||
             n.text == "true" || n.text == "false" || is_none(n);
  return n;
}

Node list_node(const std::vector<std::string>& values) {
  Node n;
  n.kind = Node::Kind::List;
  for (const std::string& v : values) n.items.push_back(string_node(v));
  return n;
}

Node list_node(const std::vector<std::int64_t>& values) {
  Node n;
  n.kind = Node::Kind::List;
  for (std::int64_t v : values) n.items.push_back(number_node(v));
  return n;
}

} // namespace gdn::config
