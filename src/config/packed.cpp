#include "config/packed.h"

#include <fmt/core.h>

#include "config/node_path.h"

namespace gdn::config {

namespace {

constexpr char kEnd = '\x1f'; // of a field; no profile text holds one (require_text)

// Kind, position and content of a node, each ended by kEnd; behind a list or a map its children.
void write(std::string& out, const Node& node) {
  const std::size_t column = node.where.rfind(':'), line = column == std::string::npos ? column : node.where.rfind(':', column - 1);
  auto field = [&](std::string_view text) { (out += text) += kEnd; };
  auto position = [&](const std::string& where, std::size_t from) { field(from == std::string::npos ? std::string_view{} : std::string_view(where).substr(from + 1)); };
  const char* kinds = "nslm";
  out += node.quoted ? 'q' : kinds[static_cast<int>(node.kind)];
  position(node.where, line);
  switch (node.kind) {
  case Node::Kind::Null: break;
  case Node::Kind::Scalar: field(node.text); break;
  case Node::Kind::List:
    field(fmt::format("{}", node.items.size()));
    for (const Node& item : node.items) write(out, item);
    break;
  case Node::Kind::Map:
    field(fmt::format("{}", node.entries.size()));
    for (const Entry& e : node.entries) {
      field(e.key);
      const std::size_t c = e.where.rfind(':');
      position(e.where, c == std::string::npos ? c : e.where.rfind(':', c - 1));
      write(out, e.value);
    }
    break;
  }
}

class Reader {
public:
  Reader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  void read(Node& node, std::string path) {
    const char kind = text_[at_++];
    node.where = position();
    node.path = std::move(path);
    if (kind == 'n') return;
    if (kind == 's' || kind == 'q') {
      node.kind = Node::Kind::Scalar;
      node.quoted = kind == 'q';
      node.text = field();
      return;
    }
    node.kind = kind == 'l' ? Node::Kind::List : Node::Kind::Map;
    const std::size_t count = std::stoul(std::string(field()));
    if (kind == 'l') {
      node.items.resize(count);
      for (Node& item : node.items) read(item, path_in_list(node, static_cast<std::size_t>(&item - node.items.data())));
      return;
    }
    node.entries.resize(count);
    for (Entry& e : node.entries) {
      e.key = field();
      e.where = position();
      read(e.value, path_in_map(node, e.key));
    }
  }

private:
  std::string_view field() {
    const std::size_t end = text_.find(kEnd, at_);
    const std::string_view found = text_.substr(at_, end - at_);
    at_ = end + 1;
    return found;
  }
  std::string position() {
    const std::string_view at = field();
    std::string where = file_;
    if (!at.empty()) (where += ':') += at;
    return where;
  }

  std::string_view text_;
  const std::string& file_;
  std::size_t at_ = 0;
};

} // namespace

std::string pack(const Node& document) {
  std::string out;
  write(out, document);
  return out;
}

Node unpack(std::string_view packed, const std::string& file) {
  Node document;
  Reader(packed, file).read(document, {});
  return document;
}

} // namespace gdn::config
