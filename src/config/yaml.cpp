#include "config/yaml.h"

#include <sstream>
#include <unordered_set>

#include <fmt/core.h>
#include <yaml-cpp/emitter.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include "config/node_path.h"
#include "config/text.h"
#include "core/error.h"

namespace gdn::config {

namespace {

// Builds nodes from the library's events. Its own document type is not used: there, duplicate keys
// pass silently and positions of keys are lost.
class Builder : public YAML::EventHandler {
public:
  Builder(std::string file, int most_values) : file_(std::move(file)), most_values_(most_values) {}

  Node root;

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnAnchor(const YAML::Mark& mark, const std::string&) override { refuse_alias(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse_alias(mark); }

  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override {
    if (expects_key()) fail(mark, "a key is missing");
    add(mark, Node::Kind::Null);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                const std::string& value) override {
    check_tag(mark, tag);
    if (expects_key()) {
      Frame& f = stack_.back();
      if (!f.keys.insert(value).second) fail(mark, fmt::format("duplicate key '{}'", value.substr(0, 100)));
      f.node->entries.push_back({value, where(mark), {}});
      f.has_key = true;
      return;
    }
    Node& n = add(mark, Node::Kind::Scalar);
    n.text = value;
    n.quoted = tag == "!"; // the library's mark for any quoted or block scalar
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, Node::Kind::List);
  }
  void OnSequenceEnd() override { stack_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, Node::Kind::Map);
  }
  void OnMapEnd() override { stack_.pop_back(); }

private:
  struct Frame {
    Node* node;
    bool has_key = false;                       // Map: a key has been read and waits for its value
    std::unordered_set<std::string> keys = {};  // Map: those read so far
  };

  std::string where(const YAML::Mark& mark) const {
    return fmt::format("{}:{}:{}", file_, mark.line + 1, mark.column + 1);
  }
  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& message) const {
    throw Error(ErrorCode::Config, fmt::format("{}: {}", where(mark), message));
  }
  [[noreturn]] void refuse_alias(const YAML::Mark& mark) const {
    fail(mark, "anchors and aliases are not supported; write the value out");
  }
  void check_tag(const YAML::Mark& mark, const std::string& tag) const {
    if (tag != "?" && tag != "!" && !tag.empty())
      fail(mark, fmt::format("tags are not supported: '{}'", tag.substr(0, 60)));
  }
  bool expects_key() const {
    return !stack_.empty() && stack_.back().node->kind == Node::Kind::Map && !stack_.back().has_key;
  }

  // Pointers on the stack stay valid: a node is complete before its parent grows again.
  Node& add(const YAML::Mark& mark, Node::Kind kind) {
    if (++values_ > most_values_) fail(mark, fmt::format("more than {} values", most_values_));
    Node* n = &root;
    std::string path;
    if (!stack_.empty()) {
      Frame& f = stack_.back();
      if (f.node->kind == Node::Kind::List) {
        path = path_in_list(*f.node, f.node->items.size());
        n = &f.node->items.emplace_back();
      } else {
        Entry& e = f.node->entries.back();
        path = path_in_map(*f.node, e.key);
        n = &e.value;
        f.has_key = false;
      }
    }
    n->kind = kind;
    n->where = where(mark);
    n->path = std::move(path);
    return *n;
  }

  void open(const YAML::Mark& mark, const std::string& tag, Node::Kind kind) {
    check_tag(mark, tag);
    if (expects_key()) fail(mark, "a key must be a word, not a list or a map; is a bracket left open?");
    if (stack_.size() >= kMaxDepth) fail(mark, fmt::format("nested deeper than {} levels", kMaxDepth));
    stack_.push_back({&add(mark, kind)});
  }

  std::string file_;
  std::vector<Frame> stack_ = {};
  int values_ = 0, most_values_;
};

void emit(YAML::Emitter& out, const Node& node) {
  switch (node.kind) {
  case Node::Kind::Null: out << YAML::Null; break;
  case Node::Kind::Scalar:
    if (node.quoted) out << YAML::DoubleQuoted;
    out << node.text;
    break;
  case Node::Kind::List: {
    bool flat = true;
    for (const Node& item : node.items) flat = flat && item.kind == Node::Kind::Scalar;
    if (flat) out << YAML::Flow;
    out << YAML::BeginSeq;
    for (const Node& item : node.items) emit(out, item);
    out << YAML::EndSeq;
    break;
  }
  case Node::Kind::Map:
    if (node.entries.empty()) out << YAML::Flow;
    out << YAML::BeginMap;
    for (const Entry& e : node.entries) {
      out << YAML::Key << e.key << YAML::Value;
      emit(out, e.value);
    }
    out << YAML::EndMap;
    break;
  }
}

} // namespace

Node parse_yaml(std::string_view text, const std::string& file, const TextLimits& limits) {
  require_text(text, file, limits);
  Builder builder(file, limits.values);
  builder.root.where = fmt::format("{}:1:1", file);
  try {
    std::istringstream in{std::string(text)};
    YAML::Parser parser(in);
    if (!parser.HandleNextDocument(builder))
      throw Error(ErrorCode::Config, fmt::format("{}:1:1: the file is empty", file));
    Builder second(file, limits.values);
    if (parser.HandleNextDocument(second))
      throw Error(ErrorCode::Config,
                  fmt::format("{}: more than one document", second.root.where.empty() ? file : second.root.where),
                  "keep one document a file; '---' starts another");
  } catch (const YAML::Exception& e) {
    throw Error(ErrorCode::Config, e.mark.is_null()
                                       ? fmt::format("{}: {}", file, e.msg)
                                       : fmt::format("{}:{}:{}: {}", file, e.mark.line + 1, e.mark.column + 1, e.msg));
  }
  return std::move(builder.root);
}

std::string to_yaml(const Node& node) {
  YAML::Emitter out;
  emit(out, node);
  return std::string(out.c_str()) + "\n";
}

} // namespace gdn::config
