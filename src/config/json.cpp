#include "config/json.h"

#include <cstring>
#include <unordered_set>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "config/text.h"
#include "core/error.h"

namespace gdn::config {

namespace {

// Counts what the lexer has consumed, which is all the library tells about positions while it
// reads: SAX events carry none.
class CountingIterator {
public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }
  friend bool operator!=(const CountingIterator& a, const CountingIterator& b) { return a.at_ != b.at_; }

private:
  const char* at_;
  const char** furthest_;
};

class Builder : public nlohmann::json_sax<nlohmann::json> {
public:
  Builder(std::string_view text, const std::string& file, const char** furthest)
      : text_(text), positions_(text, file), furthest_(furthest) {}

  Node root;

  bool null() override { return add_word("null", Node::Kind::Null); }
  bool boolean(bool value) override { return add_word(value ? "true" : "false", Node::Kind::Scalar); }
  bool number_integer(number_integer_t) override { return add_number(); }
  bool number_unsigned(number_unsigned_t) override { return add_number(); }
  bool number_float(number_float_t, const string_t&) override { return add_number(); }
  bool string(string_t& value) override {
    Node& n = add(string_start(), Node::Kind::Scalar);
    n.text = value;
    n.quoted = true;
    return true;
  }
  bool binary(binary_t&) override { return false; } // not in JSON text
  bool start_object(std::size_t) override { return open(Node::Kind::Map); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(Node::Kind::List); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    Frame& map = stack_.back();
    std::size_t at = string_start();
    if (!map.keys.insert(value).second) fail(at, fmt::format("duplicate key '{}'", value.substr(0, 100)));
    map.node->entries.push_back({value, positions_.at(at), {}});
    return true;
  }

  bool parse_error(std::size_t byte, const std::string&, const nlohmann::detail::exception& e) override {
    // The library's text is "[json.exception...] parse error at line 1, column 2: what happened".
    std::string what = e.what();
    std::size_t colon = what.find(": ");
    fail(byte > 0 ? byte - 1 : 0, "not JSON: " + (colon == std::string::npos ? what : what.substr(colon + 2)));
  }

private:
  struct Frame {
    Node* node;
    std::unordered_set<std::string> keys = {}; // of an object: those read so far
  };

  [[noreturn]] void fail(std::size_t at, const std::string& message) const {
    throw Error(ErrorCode::Config, fmt::format("{}: {}", positions_.at(at), message));
  }
  std::size_t consumed() const { return static_cast<std::size_t>(*furthest_ - text_.data()); }

  // Start of the string token that ended at the consumed position: back to the quote that no odd
  // run of backslashes escapes.
  std::size_t string_start() const {
    std::size_t i = consumed() - 1; // the closing quote
    while (i > 0) {
      --i;
      if (text_[i] != '"') continue;
      std::size_t slashes = 0;
      while (slashes < i && text_[i - 1 - slashes] == '\\') ++slashes;
      if (slashes % 2 == 0) return i;
    }
    return 0;
  }

  bool add_word(const char* word, Node::Kind kind) {
    Node& n = add(consumed() - std::strlen(word), kind);
    if (kind == Node::Kind::Scalar) n.text = word;
    return true;
  }

  // The lexer reads one character beyond a number unless the text ends there. The digits are taken
  // from the text, so 1e-06 and integers beyond 64 bits keep their spelling.
  bool add_number() {
    auto part = [&](std::size_t i) { return std::strchr("0123456789+-.eE", text_[i]) != nullptr; };
    std::size_t end = consumed();
    if (end > 0 && !part(end - 1)) --end;
    std::size_t begin = end;
    while (begin > 0 && part(begin - 1)) --begin;
    add(begin, Node::Kind::Scalar).text = std::string(text_.substr(begin, end - begin));
    return true;
  }

  Node& add(std::size_t at, Node::Kind kind) {
    if (++values_ > kConfiguration.values) fail(at, fmt::format("more than {} values", kConfiguration.values));
    Node* n = &root;
    std::string path;
    if (!stack_.empty()) {
      Node& parent = *stack_.back().node;
      if (parent.kind == Node::Kind::List) {
        path = fmt::format("{}[{}]", parent.path, parent.items.size());
        n = &parent.items.emplace_back();
      } else {
        Entry& e = parent.entries.back();
        path = parent.path.empty() ? e.key : parent.path + "." + e.key;
        n = &e.value;
      }
    }
    n->kind = kind;
    n->where = positions_.at(at);
    if (path.size() > 200) path = path.substr(0, 200) + "...";
    n->path = std::move(path);
    return *n;
  }

  bool open(Node::Kind kind) {
    std::size_t at = consumed() - 1;
    if (stack_.size() >= kMaxDepth) fail(at, fmt::format("nested deeper than {} levels", kMaxDepth));
    stack_.push_back({&add(at, kind)});
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  std::string_view text_;
  Positions positions_;
  const char** furthest_;
  std::vector<Frame> stack_ = {};
  int values_ = 0;
};

} // namespace

Node parse_json(std::string_view text, const std::string& file) {
  require_text(text, file);
  const char* furthest = text.data();
  Builder builder(text, file, &furthest);
  CountingIterator begin(text.data(), &furthest), end(text.data() + text.size(), &furthest);
  if (!nlohmann::json::sax_parse(begin, end, &builder))
    throw Error(ErrorCode::Config, fmt::format("{}: not JSON", file));
  return std::move(builder.root);
}

} // namespace gdn::config
